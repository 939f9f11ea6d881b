"""Recurrent networks, speech, and GPTs as nanoGPT has them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from real_programs.pieces import Block
from step_parts import Program
from torch import nn

from library_programs.record import backend, descend, many, program, state_of, training, variant


class RNNModel(nn.Module):
    """word_language_model of the examples."""

    def __init__(self, kind: str, vocab: int = 30, d: int = 16, layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocab, d)
        self.rnn = getattr(nn, kind)(d, d, layers, dropout=dropout)
        self.decoder = nn.Linear(d, vocab)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).view(-1, 30), dim=1), hidden


def text(device: str, length: int = 6, n: int = 4) -> list[tuple[Any, ...]]:
    return many(
        lambda g: [torch.randint(30, (length, n), generator=g), torch.randint(30, (length * n,), generator=g)], device
    )


@program
def gru_language_model_hidden_in_an_attribute(device: str) -> Program:

    class Trainer:
        def __init__(self) -> None:
            self.model = RNNModel("GRU").to(device)
            self.hidden = torch.zeros(2, 4, 16, device=device)
            self.total_loss = torch.zeros((), device=device)

        def train_step(self, data, targets):
            self.model.zero_grad()
            hidden = self.hidden.detach()
            output, hidden = self.model(data, hidden)
            loss = nn.functional.nll_loss(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.25)
            with torch.no_grad():
                for p in self.model.parameters():
                    p.add_(p.grad, alpha=-2.0)
            self.hidden = hidden.detach()
            self.total_loss = self.total_loss + loss.detach()
            return loss.detach()

    trainer = Trainer()

    def between(index: int) -> None:
        if index == 8:
            trainer.hidden = torch.zeros(2, 4, 16, device=device)
        if index % 4 == 3:
            trainer.total_loss = torch.zeros((), device=device)

    return Program(
        trainer.train_step,
        text(device),
        lambda: [*state_of(trainer.model), trainer.hidden, trainer.total_loss],
        between,
    )


@program
def lstm_language_model_states_in_two_attributes(device: str) -> Program:
    model = RNNModel("LSTM").to(device)
    model.h, model.c = torch.zeros(2, 4, 16, device=device), torch.zeros(2, 4, 16, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0, fused=True)

    def step(data, targets):
        model.train()
        output, (h, c) = model(data, (model.h, model.c))
        model.h, model.c = h.detach(), c.detach()
        loss = F.nll_loss(output, targets)
        descend(loss, optimizer, clip=0.25)
        return {"loss": loss, "ppl": loss.detach().exp()}

    def between(index: int) -> None:
        if index in (5, 9):
            optimizer.param_groups[0]["lr"] /= 4.0

    return Program(step, text(device), lambda: [*state_of(model, optimizer), model.h, model.c], between)


@program
def lstm_language_model_states_in_a_new_tuple(device: str) -> Program:
    """repackage_hidden as in the example; refused is fine: a tuple is bound again."""
    model = RNNModel("LSTM").to(device)
    holder = {"hidden": (torch.zeros(2, 4, 16, device=device), torch.zeros(2, 4, 16, device=device))}

    def repackage_hidden(h):
        return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)

    def step(data, targets):
        model.zero_grad()
        hidden = repackage_hidden(holder["hidden"])
        output, hidden = model(data, hidden)
        loss = F.nll_loss(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-1.0)
        holder["hidden"] = repackage_hidden(hidden)
        return loss.detach()

    return Program(step, text(device), lambda: [*state_of(model), *holder["hidden"]])


@program
def ctc_speech_recogniser(device: str) -> Program:
    """Refused is fine on a GPU."""
    conv = nn.Conv1d(8, 16, 3, padding=1).to(device)
    rnn = nn.LSTM(16, 16, bidirectional=True, batch_first=True).to(device)
    head = nn.Linear(32, 12).to(device)
    params = [*conv.parameters(), *rnn.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)

    def loss_of(x, targets, in_lengths, target_lengths):
        out, _ = rnn(F.relu(conv(x)).transpose(1, 2))
        return ctc(F.log_softmax(head(out), dim=2).transpose(0, 1), targets, in_lengths, target_lengths)

    data = many(
        lambda g: [
            torch.randn(4, 8, 16, generator=g),
            torch.randint(1, 12, (4, 5), generator=g),
            torch.full((4,), 16),
            torch.randint(2, 6, (4,), generator=g),
        ],
        device,
    )
    return training(loss_of, optimizer, data, params)


class GPT(nn.Module):
    def __init__(self, vocab=48, d=32, heads=4, layers=2, dropout=0.0, checkpoint=False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(16, d)
        self.h = nn.ModuleList([Block(d, heads, dropout, causal=True) for _ in range(layers)])
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        self.wte.weight = self.lm_head.weight
        self.checkpoint = checkpoint

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    def configure_optimizers(self, weight_decay, rate, **options):
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), **options)


def tokens(device: str, micro: int = 2) -> list[tuple[Any, ...]]:
    return many(lambda g: [torch.randint(48, (micro, 2, 2, 12), generator=g)], device)


def nano_gpt(device: str, *, compiled: bool = False, decay: bool = True, **options: Any) -> Program:
    model = GPT(**options).to(device)
    optimizer = model.configure_optimizers(0.1, 6e-4, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=False)
    ctx = torch.autocast(device, torch.bfloat16)
    called = torch.compile(model, backend=backend(device)) if compiled else model

    def get_lr(it):
        if it < 4:
            return 6e-4 * (it + 1) / 5
        coeff = 0.5 * (1.0 + math.cos(math.pi * min((it - 4) / 10, 1)))
        return 6e-5 + coeff * (6e-4 - 6e-5)

    def step(batch):
        for X, Y in batch:
            with ctx:
                _, loss = called(X, Y)
                loss = loss / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach() * 2

    def between(index: int) -> None:
        if decay:
            for group in optimizer.param_groups:
                group["lr"] = get_lr(index + 1)

    return Program(step, tokens(device), lambda: state_of(model, optimizer), between)


variant("nano_gpt_accumulating_with_fused_adamw", nano_gpt)
variant("nano_gpt_compiled_inside", nano_gpt, compiled=True)
variant("nano_gpt_checkpointed_blocks", nano_gpt, decay=False, checkpoint=True)
# Refused is fine: the recomputed part draws random numbers.
variant("nano_gpt_checkpointed_blocks_with_dropout", nano_gpt, decay=False, checkpoint=True, dropout=0.1)
