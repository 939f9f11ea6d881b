"""Steps over code from `torch.compile`: what compiled code does for one call does not refuse the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations.capture.step.graphed_step import GraphedStep

ROWS, SIZE = 3, 4


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def training() -> Callable[[torch.Tensor], torch.Tensor]:
    """A step over a compiled network, which saves its batch for the backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, 1))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = compiled(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


Batches = Callable[[torch.Tensor, int], torch.Tensor]

BATCHES: dict[str, Batches] = {
    "rows of a data set": lambda data, index: data[index],
    "slices": lambda data, index: data.flatten(0, 1)[index * ROWS : (index + 1) * ROWS],
    "reshaped": lambda data, index: data[index].clone().reshape(1, ROWS, SIZE),
    "views and others in turn": lambda data, index: data[index] if index % 2 else data[index].clone(),
    "at first a view": lambda data, index: data[index] if index < 4 else data[index].clone(),
    "a view in the end": lambda data, index: data[index].clone() if index < 4 else data[index],
    "transposed": lambda data, index: data[index].clone().t().contiguous().t(),
}


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_view_of_a_batch_is_the_same_batch(name: str) -> None:
    """Compiled code detaches what it saves of its arguments if that is a view. A placeholder is none."""
    data = torch.randn(10, ROWS, SIZE, generator=torch.Generator().manual_seed(1))
    batches = [BATCHES[name](data, index) for index in range(len(data))]
    expected = list(map(training(), batches))
    torch.compiler.reset()
    graphed = GraphedStep(training(), device=CpuDevice())
    found = list(map(graphed, batches))
    assert [one.item() for one in found] == [one.item() for one in expected]
    report = graphed.report()
    assert report.refusals == ()
    assert report.replays >= 6


def test_step_that_detaches_in_some_calls_is_recorded_for_each() -> None:
    """The detach itself runs nothing, but the backward ends there."""

    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(SIZE, SIZE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        calls: list[int] = []

        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            hidden = model(batch)
            other = model(hidden.detach() if len(calls) % 2 else hidden)
            loss: torch.Tensor = other.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, calls

    def run(step: Any, calls: list[int]) -> list[float]:
        found = []
        for index in range(10):
            found.append(step(torch.full((ROWS, SIZE), 0.1 * index)).item())
            calls.append(index)
        return found

    step, calls = made()
    expected = run(step, calls)
    step, calls = made()
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        assert run(GraphedStep(step, device=CpuDevice()), calls) == expected
