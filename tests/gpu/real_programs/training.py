"""Training loops, of users and of libraries."""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

import torch
from torch import nn

from real_programs.pieces import batches, bert_config, built, descend, gpt2_config, integers, mlp, normal, weights
from real_programs.record import Body, Setting, program


@program(calls=5, trains=True)
def gpt2_checkpointed(setting: Setting) -> Body:
    """Hugging Face GPT-2 trained with gradient checkpointing."""
    from transformers import GPT2LMHeadModel

    config = gpt2_config(setting)
    model = built(setting, lambda: GPT2LMHeadModel(config)).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    call = setting.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = batches(3, lambda generator: integers(setting, generator, config.vocab_size, 4, setting.pick(64, 8)))

    def step(i: int) -> Any:
        return descend(call(data[i % 3], labels=data[i % 3]).loss, optimizer)

    return Body(step, lambda: weights(model))


@program(calls=6, trains=True)
def compiled_adam_with_clipping(setting: Setting) -> Body:
    """Gradients clipped by their norm, a compiled Adam step, a learning rate that a scheduler changes."""
    width = setting.pick(256, 16)
    model = built(setting, lambda: mlp(width, 6))
    call = setting.compile(model)
    capturable = setting.device.type == "cuda"
    rate = torch.tensor(1e-3, device=setting.device if capturable else "cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=capturable)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = batches(3, lambda generator: normal(setting, generator, setting.pick(64, 4), width))

    @setting.compile
    def update() -> None:
        optimizer.step()

    def step(i: int) -> Any:
        loss = nn.functional.mse_loss(call(data[i % 3]), data[(i + 1) % 3])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        update()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return Body(step, lambda: weights(model))


@program(calls=2, trains=True, needs=("accelerate",))
def hugging_face_trainer(setting: Setting) -> Body:
    """Hugging Face `Trainer`: a few steps with two micro-batches each."""
    from transformers import BertForSequenceClassification, Trainer, TrainingArguments

    config = bert_config(setting, num_labels=3)
    model = built(setting, lambda: BertForSequenceClassification(config))
    setting.compile_in_place(model)
    generator = torch.Generator().manual_seed(7)
    data = [
        {
            "input_ids": torch.randint(config.vocab_size, (setting.pick(32, 8),), generator=generator),
            "labels": int(torch.randint(3, (), generator=generator)),
        }
        for _ in range(32)
    ]

    def step(i: int) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=setting.pick(6, 2),
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                learning_rate=1e-4,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                use_cpu=setting.device.type == "cpu",
                seed=i,
            )
            outcome = Trainer(model=model, args=arguments, train_dataset=data).train()
        return outcome.training_loss

    return Body(step, lambda: weights(model))


@program(calls=3, trains=True, needs=("accelerate",))
def accelerate_loop(setting: Setting) -> Body:
    """accelerate: model, optimizer and loader prepared by it, gradients accumulated, losses gathered at the end."""
    from accelerate import Accelerator

    width = setting.pick(256, 16)
    network = built(setting, lambda: mlp(width, 4))
    accelerator = Accelerator(cpu=setting.device.type == "cpu", gradient_accumulation_steps=2)
    data = batches(6, lambda generator: torch.randn(setting.pick(64, 4), width, generator=generator))
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(setting.compile(network), optimizer, loader)

    def step(i: int) -> Any:
        losses = []
        for x in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), x)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)

    return Body(step, lambda: weights(network))


@program(calls=2, trains=True, needs=("pytorch_lightning",))
def lightning_fit(setting: Setting) -> Body:
    """Lightning: `fit` with a validation loop in each epoch."""
    import logging
    import warnings

    import pytorch_lightning as lightning

    warnings.filterwarnings("ignore", module="pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    width, classes = setting.pick(256, 16), 5
    network = built(setting, lambda: mlp(width, 4, width, classes))
    call = setting.compile(network)

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network
            self.collected: list[torch.Tensor] = []
            self.means: list[torch.Tensor] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(call(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.collected.append(call(batch[0]))

        def on_validation_epoch_end(self) -> None:
            self.means.append(torch.cat(self.collected).softmax(-1).mean(0))
            self.collected.clear()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    module = Classifier()
    data = batches(
        4,
        lambda generator: (
            torch.randn(setting.pick(64, 4), width, generator=generator),
            torch.randint(classes, (setting.pick(64, 4),), generator=generator),
        ),
    )
    loader = torch.utils.data.DataLoader(data, batch_size=None)

    def step(i: int) -> Any:
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu" if setting.device.type == "cpu" else "gpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        module.means.clear()
        trainer.fit(module, loader, loader)
        return list(module.means)

    return Body(step, lambda: weights(network))


@program(calls=6, trains=True)
def gan_step(setting: Setting) -> Body:
    """A generator and a discriminator that train alternately; the generated batch is read by both."""
    width = setting.pick(256, 16)
    generator_network = built(setting, lambda: mlp(width, 3), seed=1)
    judge_network = built(setting, lambda: mlp(width, 3, width, 1), seed=2)
    generate, judge = setting.compile(generator_network), setting.compile(judge_network)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-4) for each in (generator_network, judge_network)]
    data = batches(3, lambda generator: [normal(setting, generator, setting.pick(64, 4), width) for _ in range(2)])

    def step(i: int) -> Any:
        real, noise = data[i % 3]
        made = generate(noise)
        judge_loss = nn.functional.softplus(judge(made.detach())).mean() + nn.functional.softplus(-judge(real)).mean()
        optimizers[1].zero_grad()
        judge_loss.backward()
        optimizers[1].step()
        generator_loss = nn.functional.softplus(-judge(made)).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        generator_loss.backward()
        optimizers[0].step()
        return judge_loss.detach(), generator_loss.detach()

    return Body(step, lambda: list(itertools.chain(weights(generator_network), weights(judge_network))))
