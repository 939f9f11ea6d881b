"""Models, losses and optimizers of timm."""

from __future__ import annotations

from typing import Any

import numpy
import torch
import torch.nn.functional as F
from step_parts import Program
from torch import nn

from library_programs.record import CALLS, images, on_gpu, program, state_of, training, variant


def timm_model(name: str, device: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=5, **options).to(device)


def timm_optimizer(model: nn.Module, name: str, **options: Any) -> Any:
    from timm.optim import create_optimizer_v2

    return create_optimizer_v2(model, opt=name, **options)


def small_vit(device: str, **options: Any) -> nn.Module:
    given = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return timm_model("vit_tiny_patch16_224", device, **{**given, **options})


def mixed(device: str, classes: int = 5, **options: Any) -> list[tuple[Any, ...]]:
    """Batches that timm's Mixup made, as its train.py does before the step."""
    from timm.data import Mixup

    numpy.random.seed(4)
    mix = Mixup(num_classes=classes, **options)
    return [tuple(t.to(device) for t in mix(x.to(device), y)) for x, y in images("cpu")]


@program
def timm_vit_mixup_native_scaler_ema_cosine_updates(device: str) -> Program:
    """train.py: NativeScaler with clipping, ModelEmaV3 and CosineLRScheduler per update, after the step."""
    from timm.loss import SoftTargetCrossEntropy
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3, NativeScaler

    model = small_vit(device, drop_path_rate=0.1)
    optimizer = timm_optimizer(model, "adamw", lr=1e-3, weight_decay=0.05, fused=True)
    scheduler = CosineLRScheduler(optimizer, t_initial=12, warmup_t=3, warmup_lr_init=1e-5, t_in_epochs=False)
    scaler = NativeScaler(device=device)
    ema = ModelEmaV3(model, decay=0.9, use_warmup=True)
    loss_fn = SoftTargetCrossEntropy()

    def step(inputs, target):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = loss_fn(model(inputs), target)
        optimizer.zero_grad()
        scaler(loss, optimizer, clip_grad=1.0, clip_mode="norm", parameters=model.parameters())
        return loss.detach()

    def between(index):
        ema.update(model, step=index + 1)
        scheduler.step_update(num_updates=index + 1)

    batches = mixed(device, mixup_alpha=0.8, cutmix_alpha=1.0)
    return Program(step, batches, lambda: state_of(model, optimizer, ema), between)


@program
def timm_resnet_ema_in_the_step_sgd(device: str) -> Program:
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    model = timm_model("resnet10t", device, drop_rate=0.1)
    optimizer = timm_optimizer(model, "sgd", lr=0.02, momentum=0.9, weight_decay=1e-4)
    ema = ModelEmaV3(model, decay=0.9)
    loss_fn = LabelSmoothingCrossEntropy(0.1)

    def step(inputs, target):
        loss = loss_fn(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        dispatch_clip_grad(model.parameters(), value=0.02, mode="agc")
        optimizer.step()
        ema.update(model)
        return loss.detach()

    return Program(step, images(device), lambda: state_of(model, optimizer, ema))


def timm_vit(device: str, opt: str, lr: float = 1e-3) -> Program:
    """A ViT with one of timm's own optimizers, at a fixed learning rate."""

    model = small_vit(device)
    optimizer = timm_optimizer(model, opt, lr=lr, weight_decay=0.02)
    return training(lambda x, y: F.cross_entropy(model(x), y), optimizer, images(device), model)


for name, options in {
    "muon": {"lr": 0.02},
    "lamb": {},
    "radabelief": {},
    "lion": {"lr": 1e-4},
    "lookahead_sgd": {"lr": 0.05},
    "adafactorbv": {},
    "rmsproptf": {},
    "lars": {"lr": 0.1},
}.items():
    variant(f"timm_vit_{name}", timm_vit, name, **options)


@program
def timm_lookahead_adamw_step_schedule_epochs(device: str) -> Program:
    """Lookahead syncs on the sixth call, by a counter in Python."""
    from timm.scheduler import StepLRScheduler

    model = timm_model("mobilenetv3_small_050", device, drop_rate=0.1)
    optimizer = timm_optimizer(model, "lookahead_adamw", lr=1e-3, weight_decay=0.05, fused=True)
    scheduler = StepLRScheduler(optimizer, decay_t=1, decay_rate=0.9, warmup_t=1, warmup_lr_init=1e-4)

    def between(index):
        if index % 4 == 3:
            optimizer.sync_lookahead()
            scheduler.step(index // 4 + 1)

    return training(
        lambda inputs, target: F.cross_entropy(model(inputs), target), optimizer, images(device), model, between=between
    )


@program
def timm_convnext_layer_decay_tanh_bce(device: str) -> Program:
    """Layer-wise decay of the learning rate, BinaryCrossEntropy on mixed labels, checkpointing."""
    from timm.loss import BinaryCrossEntropy
    from timm.scheduler import TanhLRScheduler

    model = timm_model("convnext_atto", device, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))
    model.set_grad_checkpointing(True)
    optimizer = timm_optimizer(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75, fused=True)
    scheduler = TanhLRScheduler(optimizer, t_initial=CALLS, t_in_epochs=False)
    loss_fn = BinaryCrossEntropy(target_threshold=0.2)

    return training(
        lambda inputs, target: loss_fn(model(inputs), target),
        optimizer,
        mixed(device, mixup_alpha=0.2),
        model,
        between=lambda index: scheduler.step_update(index + 1),
    )


@program
def timm_swin_accumulates_with_need_update(device: str) -> Program:
    """NativeScaler with need_update in every second call, as in train.py with --grad-accum-steps 2."""
    from timm.utils import NativeScaler

    model = timm_model(
        "swin_tiny_patch4_window7_224",
        device,
        img_size=32,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
        drop_path_rate=0.1,
    )
    optimizer = timm_optimizer(model, "adamw", lr=1e-3, fused=True)
    scaler = NativeScaler(device=device)

    def step(inputs, target, need_update):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), target)
        loss = loss / 2
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), need_update=need_update)
        if need_update:
            optimizer.zero_grad()
        return loss.detach()

    batches = [(*batch, index % 2 == 1) for index, batch in enumerate(images(device))]
    return Program(step, batches, lambda: state_of(model, optimizer))


@program
def timm_mixer_jsd_three_splits(device: str) -> Program:
    from timm.loss import JsdCrossEntropy

    model = timm_model("mixer_s32_224", device, img_size=64, drop_path_rate=0.1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    loss_fn = JsdCrossEntropy(num_splits=3, smoothing=0.1)

    return training(
        lambda inputs, target: loss_fn(
            model(torch.cat([inputs, inputs.flip(-1), inputs + 0.1 * torch.randn_like(inputs)])), target
        ),
        optimizer,
        images(device, rows=2, size=64),
        model,
    )


@program
def timm_regnet_asymmetric_multi_label_metrics(device: str) -> Program:
    from timm.loss import AsymmetricLossMultiLabel

    model = timm_model("regnetx_002", device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True, capturable=on_gpu(device))
    loss_fn = AsymmetricLossMultiLabel()
    hits = torch.zeros(5, device=device)

    def loss_and_hits(inputs, target):
        labels = F.one_hot(target, 5).float()
        labels[labels == 0] = 0.05
        output = model(inputs)
        hits.add_(((output.detach() > 0) == (labels > 0.5)).float().sum(0))
        return loss_fn(output, labels), {"hits": hits.clone()}

    return training(loss_and_hits, optimizer, images(device), model, hits)


@program
def timm_mixup_inside_of_the_step(device: str) -> Program:
    """Mixup draws from NumPy: a refusal is expected."""
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy

    model = small_vit(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mix, loss_fn = Mixup(mixup_alpha=0.8, num_classes=5), SoftTargetCrossEntropy()
    numpy.random.seed(8)

    def loss_of(inputs, target):
        inputs, target = mix(inputs, target)
        return loss_fn(model(inputs), target)

    return training(loss_of, optimizer, images(device), model, detached=True)
