"""Writes of a step in every form, and arguments in memory that it reads or writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.written_memory import WrittenMemory

CALLS = 14
Made = tuple[Callable[[torch.Tensor], Any], torch.Tensor | None]
"""A step, and what some calls are given in place of a batch."""


def an_argument_by_its_data() -> Made:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.data.add_(1)
        return x * 2

    return step, None


def statistics_that_are_arguments() -> Made:
    batch = torch.arange(12.0).reshape(3, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(batch, x, torch.ones(4), training=True)

    return step, None


def a_buffer_by_its_data() -> Made:
    kept = torch.ones(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        kept.data.add_(1)
        return x * 2

    return step, kept


def statistics_of_a_module() -> Made:
    norm, batch = nn.BatchNorm1d(4), torch.arange(12.0).reshape(3, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        norm(batch)
        return x * 2

    assert norm.running_mean is not None
    return step, norm.running_mean


def a_weight_that_an_optimizer_writes_with_others() -> Made:
    torch.manual_seed(3)
    model, batch = nn.Linear(3, 1), torch.arange(12.0).reshape(4, 3)
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight, *model.parameters()], lr=0.01, foreach=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        (model(batch).square().mean() + weight.square().sum()).backward()
        optimizer.step()
        return x * 2

    return step, weight.detach()


def an_argument_that_is_read_as_something_else() -> Made:
    kept = torch.ones(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return kept * 2

    return step, kept


MADE = (
    an_argument_by_its_data,
    statistics_that_are_arguments,
    a_buffer_by_its_data,
    statistics_of_a_module,
    a_weight_that_an_optimizer_writes_with_others,
    an_argument_that_is_read_as_something_else,
)


def outcome(made: Made, step: Callable[..., Any]) -> list[torch.Tensor]:
    _, kept = made
    found = []
    for index in range(CALLS):
        x = torch.arange(4.0) + index
        if kept is not None and index in (7, 9, 11):
            x = kept if index < 11 else kept[:]
        found += [step(x).clone(), x.clone()]
    return found if kept is None else [*found, kept]


@pytest.mark.parametrize("make", MADE)
def test_writes_of_a_step_equal_eager(make: Callable[[], Made]) -> None:
    eager, made = make(), make()
    expected = outcome(eager, eager[0])
    step = GraphedStep(made[0], device=CpuDevice())
    found = outcome(made, step)
    assert all(map(torch.equal, found, expected))
    others = 3 if made[1] is None else 6
    assert step.report().refusals == ()
    assert CALLS - others - 1 <= step.report().replays <= CALLS - others


def test_lazily_negative_argument_is_not_plain() -> None:
    step = GraphedStep(lambda x: x * 2, device=CpuDevice())
    for index in range(10):
        x = torch.arange(4.0) + index
        x = torch._neg_view(x) if index in (6, 8) else x
        assert torch.equal(step(x), x * 2), index


def test_input_in_written_memory_is_found() -> None:
    """Inputs differ in size: what lies just before the written memory is free for a small one."""
    whole = torch.zeros(64)
    memory = WrittenMemory([whole[16:]])
    assert not memory.holds_one_of([whole[8:16], torch.zeros(16)])
    assert memory.holds_one_of([torch.zeros(8), whole[8:24]])
    assert memory.holds_one_of([torch.zeros(4), whole[30:38]])
