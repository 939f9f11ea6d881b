"""Training loops whose values go on from call to call: averages of weights, totals and metrics that are bound again."""

from __future__ import annotations

from typing import Any

import torch
from step_parts import Program, batches, loss_of, network, program, state_of, training_step
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def averaged(device: str, **options: Any) -> Program:
    """The count is put to zero after the seventh call, so that the next one copies the weights again."""
    model = network(device, norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train, average = training_step(model, optimizer), AveragedModel(model, device=torch.device(device), **options)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch).detach()
        average.update_parameters(model)
        return loss

    def between(index: int) -> None:
        if index == 6:
            average.n_averaged.zero_()

    return Program(step, batches(device), lambda: [*state_of(model, optimizer), *state_of(average)], between)


@program
def equal_averages_of_the_weights(device: str) -> Program:
    return averaged(device)


@program
def exponential_averages_of_the_weights(device: str) -> Program:
    return averaged(device, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


class Trainer:
    """Sums up in attributes, in a dict and in a list, and keeps a hidden state."""

    def __init__(self, device: str) -> None:
        self.model = network(device)
        self.recurrent = nn.GRUCell(8, 8).to(device)
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *self.recurrent.parameters()], lr=0.1)
        self.total = torch.zeros((), device=device)
        self.metrics = {"loss": torch.zeros((), device=device), "calls": torch.zeros((), device=device)}
        self.worst = [torch.zeros((), device=device)]
        self.hidden = torch.zeros(6, 8, device=device)

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.optimizer.zero_grad()
        hidden = self.recurrent(batch["x"], self.hidden)
        loss = loss_of(self.model, {"x": hidden, "y": batch["y"]})
        loss.backward()
        self.optimizer.step()
        found = loss.detach()
        self.hidden = hidden.detach()
        self.total = self.total + found
        self.metrics["loss"] = 0.9 * self.metrics["loss"] + 0.1 * found
        self.metrics["calls"] = self.metrics["calls"] + 1
        self.worst[0] = torch.maximum(self.worst[0], found)
        return found

    def state(self) -> list[torch.Tensor]:
        parts = [self.total, self.hidden, *self.metrics.values(), *self.worst]
        return [*state_of(self.model, self.optimizer), *self.recurrent.parameters(), *parts]


@program
def totals_and_a_hidden_state_bound_again(device: str) -> Program:
    """The program begins a new epoch in mid-run, and keeps what was there."""
    trainer = Trainer(device)
    kept: list[torch.Tensor] = []

    def between(index: int) -> None:
        kept.extend([trainer.total, trainer.hidden, *trainer.metrics.values()])
        if index == 5:
            trainer.total = torch.zeros((), device=device)
            trainer.hidden = torch.ones(6, 8, device=device)

    return Program(trainer.step, batches(device), lambda: [*trainer.state(), *kept], between)
