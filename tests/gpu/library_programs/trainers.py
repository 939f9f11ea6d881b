"""Lightning, Fabric, Accelerate and diffusers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from step_parts import Program
from torch import nn

from library_programs.record import CALLS, drawn, many, program, state_of, training, variant
from library_programs.schedules import ConvNet, digits


def lit_classifier(device: str) -> Any:
    import lightning as L

    class LitClassifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = ConvNet()
            self.save_hyperparameters({"lr": 1e-3})
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.nll_loss(self(x), y)
            self.seen += y.numel()
            return {"loss": loss, "n": self.seen.clone()}

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, fused=True)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)]

    return LitClassifier().to(device)


def lightning_by_hand(device: str, indexed: bool) -> Program:
    module = lit_classifier(device)
    (optimizer,), (scheduler,) = module.configure_optimizers()

    def step(batch, batch_idx=0):
        out = module.training_step(batch, batch_idx)
        optimizer.zero_grad()
        out["loss"].backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        return {"loss": out["loss"].detach(), "n": out["n"]}

    data = [(list(batch), i) if indexed else (list(batch),) for i, batch in enumerate(digits(device))]
    return Program(step, data, lambda: state_of(module, optimizer), lambda i: scheduler.step())


def by_fabric(device: str, **clip: bool) -> Program:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=device, devices=1, precision="bf16-mixed")
    fabric.launch()
    module = lit_classifier(device)
    (optimizer,), (scheduler,) = module.configure_optimizers()
    wrapped, wrapped_optimizer = fabric.setup(module, optimizer)

    def step(x, y, i):
        accumulating = i % 2 == 0
        with fabric.no_backward_sync(wrapped, enabled=accumulating):
            out = wrapped.training_step((x, y), i)
            fabric.backward(out["loss"] / 2)
        if not accumulating:
            fabric.clip_gradients(wrapped, wrapped_optimizer, max_norm=1.0, **clip)
            wrapped_optimizer.step()
            wrapped_optimizer.zero_grad()
        return out["loss"].detach()

    def between(index: int) -> None:
        if index % 2 == 1:
            scheduler.step()

    data = [(*batch, i % 2) for i, batch in enumerate(digits(device))]
    return Program(step, data, lambda: state_of(module, optimizer), between)


def new_accelerator(device: str, **options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Accelerator(cpu=device == "cpu", **options)


@program
def accelerate_accumulating(device: str) -> Program:
    accelerator = new_accelerator(device, gradient_accumulation_steps=2, mixed_precision="bf16")
    model = ConvNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)

    def step(x, y):
        with accelerator.accumulate(prepared):
            loss = F.nll_loss(prepared(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            prepared_optimizer.step()
            prepared_optimizer.zero_grad()
        return loss.detach()

    return Program(step, digits(device), lambda: state_of(model, optimizer))


def accumulate_around(device: str, steps: int) -> Program:
    accelerator = new_accelerator(device, gradient_accumulation_steps=steps)
    model = ConvNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=CALLS)
    prepared, prepared_optimizer, prepared_scheduler = accelerator.prepare(model, optimizer, scheduler)

    def step(x, y):
        loss = F.nll_loss(prepared(x), y)
        accelerator.backward(loss)
        prepared_optimizer.step()
        prepared_optimizer.zero_grad()
        return loss.detach()

    return Program(
        step,
        digits(device),
        lambda: state_of(model, optimizer),
        lambda i: prepared_scheduler.step(),
        around_each=lambda: accelerator.accumulate(prepared),
    )


def small_unet(lower: str, upper: str, **others: Any) -> nn.Module:
    """Build a UNet of two levels, the inner one of these blocks."""
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", lower),
        up_block_types=(upper, "UpBlock2D"),
        **others,
    )


@program
def diffusers_unet_with_ddpm_scheduler(device: str) -> Program:
    from diffusers import DDPMScheduler
    from diffusers.optimization import get_cosine_schedule_with_warmup

    model = small_unet("AttnDownBlock2D", "AttnUpBlock2D", attention_head_dim=8).to(device)
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=CALLS)

    def loss_of(clean_images):
        noise = torch.randn(clean_images.shape, device=clean_images.device)
        bs = clean_images.shape[0]
        timesteps = torch.randint(0, 100, (bs,), device=clean_images.device, dtype=torch.int64)
        noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
        noise_pred = model(noisy_images, timesteps, return_dict=False)[0]
        return F.mse_loss(noise_pred, noise)

    data = many(lambda g: [drawn(g, 2, size=8)], device)
    options = {"scheduler": lr_scheduler, "clip": 1.0, "zeroed": "last", "detached": True}
    return training(loss_of, optimizer, data, model, **options)


@program
def diffusers_unet_with_ema_model(device: str) -> Program:
    """EMAModel counts in Python; it is stepped after the step. The input is weighted by min-SNR."""
    from diffusers import DDPMScheduler
    from diffusers.training_utils import EMAModel, compute_snr

    model = small_unet("DownBlock2D", "UpBlock2D", add_attention=False).to(device)
    noise_scheduler = DDPMScheduler(num_train_timesteps=100, prediction_type="v_prediction")
    noise_scheduler.alphas_cumprod = noise_scheduler.alphas_cumprod.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ema = EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True)

    def loss_of(x):
        noise = torch.randn_like(x)
        timesteps = torch.randint(0, 100, (x.shape[0],), device=x.device)
        noisy = noise_scheduler.add_noise(x, noise, timesteps)
        target = noise_scheduler.get_velocity(x, noise, timesteps)
        pred = model(noisy, timesteps).sample
        snr = compute_snr(noise_scheduler, timesteps)
        weights = torch.stack([snr, 5.0 * torch.ones_like(timesteps)], dim=1).min(dim=1)[0] / (snr + 1)
        return (F.mse_loss(pred.float(), target.float(), reduction="none").mean(dim=[1, 2, 3]) * weights).mean()

    data = many(lambda g: [drawn(g, 2, size=8)], device)
    after = lambda index: ema.step(model.parameters())  # noqa: E731
    return training(loss_of, optimizer, data, model, ema.shadow_params, between=after, detached=True)


variant("lightning_module_by_hand_with_batch_index", lightning_by_hand, True)
variant("lightning_module_by_hand", lightning_by_hand, False)
# Fabric's `clip_gradients` reads the norm by default; refused is fine.
variant("lightning_module_by_fabric_checked_clip", by_fabric)
variant("lightning_module_by_fabric", by_fabric, error_if_nonfinite=False)
variant("accelerate_with_accumulate_around_and_scheduler", accumulate_around, 1)
variant("accelerate_accumulating_two_around_and_scheduler", accumulate_around, 2)
