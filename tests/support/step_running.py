"""Training loops whose values go on from call to call: averages of weights, totals and metrics that are bound again."""

from __future__ import annotations

from typing import Any

import torch
from step_parts import Program, batches, network, program, state_of, training_step
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
