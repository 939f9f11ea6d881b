"""A translator, and schedules of learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.optim.lr_scheduler as rates
from step_parts import Program
from torch import nn

from library_programs.record import (
    CALLS,
    capturable,
    descend,
    drawn,
    many,
    on_gpu,
    on_the_device,
    program,
    state_of,
    training,
    variant,
)


class PositionalEncoding(nn.Module):
    def __init__(self, d: int, dropout: float, length: int = 32) -> None:
        super().__init__()
        den = torch.exp(-torch.arange(0, d, 2) * math.log(10000) / d)
        pos = torch.arange(0, length).reshape(length, 1)
        table = torch.zeros((length, d))
        table[:, 0::2] = torch.sin(pos * den)
        table[:, 1::2] = torch.cos(pos * den)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("table", table.unsqueeze(-2))

    def forward(self, x):
        return self.dropout(x + self.table[: x.size(0), :])


class Seq2SeqTransformer(nn.Module):
    def __init__(self, vocab: int = 40, d: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.transformer = nn.Transformer(d, 4, 2, 2, dim_feedforward=64, dropout=dropout)
        self.generator = nn.Linear(d, vocab)
        self.src, self.tgt = nn.Embedding(vocab, d), nn.Embedding(vocab, d)
        self.position, self.d = PositionalEncoding(d, dropout), d

    def forward(self, src, trg, src_mask, tgt_mask, src_pad, tgt_pad, memory_pad, **causal):
        src_emb = self.position(self.src(src.long()) * math.sqrt(self.d))
        tgt_emb = self.position(self.tgt(trg.long()) * math.sqrt(self.d))
        outs = self.transformer(src_emb, tgt_emb, src_mask, tgt_mask, None, src_pad, tgt_pad, memory_pad, **causal)
        return self.generator(outs)


def padded(g, length, n=4, vocab=40):
    tokens = torch.randint(3, vocab, (length, n), generator=g)
    ends = torch.randint(length // 2, length + 1, (n,), generator=g)
    tokens[torch.arange(length)[:, None] >= ends[None]] = 1
    return tokens


def translation(device: str, schedule: str, **causal: bool) -> Program:
    model = Seq2SeqTransformer().to(device)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    loss_fn = nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9, **on_the_device(device))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 32**-0.5 * min(max(step, 1) ** -0.5, max(step, 1) * 6**-1.5)
    )

    def step(src, tgt):
        tgt_input = tgt[:-1, :]
        tgt_mask = nn.Transformer.generate_square_subsequent_mask(tgt_input.shape[0], device)
        src_mask = torch.zeros((src.shape[0], src.shape[0]), device=device).type(torch.bool)
        src_pad = (src == 1).transpose(0, 1)
        tgt_pad = (tgt_input == 1).transpose(0, 1).float().masked_fill((tgt_input == 1).transpose(0, 1), float("-inf"))
        logits = model(src, tgt_input, src_mask, tgt_mask, src_pad, tgt_pad, src_pad, **causal)
        tgt_out = tgt[1:, :]
        loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
        descend(loss, optimizer)
        if schedule == "inside":
            scheduler.step()
        return loss

    def between(index: int) -> None:
        if schedule == "outside":
            scheduler.step()

    data = many(lambda g: [padded(g, 8), padded(g, 9)], device)
    return Program(step, data, lambda: state_of(model, optimizer), between)


variant("transformer_translation_noam_outside", translation, "outside")
# nn.Transformer then does not compare the mask with a causal one on the host.
variant(
    "transformer_translation_noam_told_what_is_causal", translation, "outside", src_is_causal=False, tgt_is_causal=True
)
# Refused is fine: `scheduler.step()` stands in the step.
variant(
    "transformer_translation_noam_scheduler_in_the_step", translation, "inside", src_is_causal=False, tgt_is_causal=True
)


class ConvNet(nn.Module):
    """The network of the MNIST example."""

    def __init__(self, dropout: bool = True) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25 * dropout), nn.Dropout(0.5 * dropout)
        self.norm = nn.BatchNorm2d(8)
        self.fc1, self.fc2 = nn.Linear(16 * 36, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def digits(device: str) -> list[tuple[Any, ...]]:
    return many(lambda g: [drawn(g, 8), torch.randint(10, (8,), generator=g)], device)


def classify(
    device: str, kind: str, options: dict[str, Any], make_scheduler: Callable[..., Any] | None = None, every: int = 1
) -> Program:
    model = ConvNet().to(device)
    given = {name: value for name, value in options.items() if name != "capturable" or on_gpu(device)}
    optimizer = getattr(torch.optim, kind)(model.parameters(), **given)
    scheduler = make_scheduler(optimizer) if make_scheduler else None

    def loss_and_hits(data, target):
        output = model(data)
        pred = output.argmax(dim=1, keepdim=True)
        return F.nll_loss(output, target), {"correct": pred.eq(target.view_as(pred)).sum()}

    return training(loss_and_hits, optimizer, digits(device), model, scheduler=scheduler, every=every)


def one_cycle(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return rates.OneCycleLR(optimizer, max_lr=1e-2, total_steps=CALLS + 1, **options)


def cyclic(optimizer: torch.optim.Optimizer, up: int, **options: Any) -> Any:
    return rates.CyclicLR(optimizer, base_lr=1e-3, max_lr=1e-1, step_size_up=up, **options)


def warm_up_then_cosine(optimizer: torch.optim.Optimizer) -> Any:
    parts = [rates.LinearLR(optimizer, 0.1, total_iters=4), rates.CosineAnnealingLR(optimizer, 12)]
    return rates.SequentialLR(optimizer, parts, [4])


FUSED, CAPTURABLE = {"lr": 1e-3, "fused": True}, {"lr": 1e-3, "capturable": True}
variant("one_cycle_with_adam_and_cycled_beta", classify, "Adam", CAPTURABLE, one_cycle)
variant(
    "one_cycle_with_adamw_and_constant_beta", classify, "AdamW", FUSED, lambda o: one_cycle(o, cycle_momentum=False)
)
variant(
    "cyclic_triangular_with_fused_sgd",
    classify,
    "SGD",
    {"momentum": 0.9, **FUSED},
    lambda o: cyclic(o, 3, mode="triangular2", cycle_momentum=False),
)
# Refused is fine: the momentum of SGD changes in every call.
variant(
    "cyclic_with_sgd_whose_momentum_is_cycled",
    classify,
    "SGD",
    {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4},
    lambda o: cyclic(o, 4),
)
variant(
    "cosine_warm_restarts_with_radam",
    classify,
    "RAdam",
    {"decoupled_weight_decay": True, "weight_decay": 0.01, **CAPTURABLE},
    lambda o: rates.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
)
variant("sequential_warm_up_then_cosine_with_fused_adamw", classify, "AdamW", FUSED, warm_up_then_cosine)
variant(
    "adadelta_of_the_mnist_example_with_step_rate",
    classify,
    "Adadelta",
    {"lr": 1.0, "capturable": True},
    lambda o: rates.StepLR(o, step_size=1, gamma=0.7),
    every=5,
)
variant("adagrad_fused", classify, "Adagrad", {"lr": 1e-2, "fused": True})
variant("asgd_averaging_early", classify, "ASGD", {"lr": 1e-2, "t0": 5, "capturable": True})
variant("rprop_foreach", classify, "Rprop", {"foreach": True, **CAPTURABLE})
variant("adamax_with_a_rate_in_a_tensor", classify, "Adamax", {"lr": 2e-3, "capturable": True})
# Counts its steps on the CPU; refused is fine.
variant("nadam_decoupled_plain", classify, "NAdam", {"lr": 2e-3, "decoupled_weight_decay": True, "weight_decay": 0.01})


@program
def plateau_by_a_validation_loss(device: str) -> Program:
    model = ConvNet().to(device)
    optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3, **capturable(device))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    held_out = digits(device)[0]

    def between(index: int) -> None:
        if index % 3 == 2:
            model.eval()
            with torch.no_grad():
                scheduler.step(F.nll_loss(model(held_out[0]), held_out[1]).item())
            model.train()

    return training(
        lambda data, target: nn.functional.nll_loss(model(data), target),
        optimizer,
        digits(device),
        model,
        between=between,
        clip=1.0,
    )
