"""Arguments that are gradients, or lie where gradients lie, of steps that write or read them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations.capture.step.graphed_step import GraphedStep

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Program:
    """A step that gets an argument next to its batch, and how often its gradients are set to None."""

    def __init__(self, *, writes: bool, forgets: bool, graphed: bool) -> None:
        torch.manual_seed(0)
        self.layer = layer = nn.Linear(3, 3, bias=False)
        layer.weight.grad = torch.zeros(3, 3)

        def step(given: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            if writes:
                given.mul_(2.0)
            if forgets:
                layer.weight.grad = None
            layer(batch).square().sum().backward()
            return given * 1

        self.graphed = GraphedStep(step, device=CpuDevice()) if graphed else None
        self.step: Step = self.graphed or step

    def gradient(self) -> torch.Tensor:
        assert self.layer.weight.grad is not None
        return self.layer.weight.grad

    def run(self, choose: Callable[[Program, int, list[torch.Tensor]], torch.Tensor]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        for index in range(18):
            torch.manual_seed(index)
            given = choose(self, index, kept)
            returned = self.step(given, torch.randn(2 if index < 7 else 4, 3))
            found += [one.clone() for one in (returned, given, self.gradient(), *kept)]
        return found


def now_and_then(program: Program, index: int, kept: list[torch.Tensor]) -> torch.Tensor:
    return torch.randn(3, 3) if index < 5 or index % 2 else program.gradient()


def the_same_from_then_on(program: Program, index: int, kept: list[torch.Tensor]) -> torch.Tensor:
    """A recording's gradient becomes the argument of calls of another shape, which get their own recording."""
    if index < 7:
        return torch.randn(3, 3)
    if not kept:
        kept.append(program.gradient())
    return kept[0]


def a_view(program: Program, index: int, kept: list[torch.Tensor]) -> torch.Tensor:
    return torch.randn(3, 3) if index < 5 or index % 2 else program.gradient().view(3, 3)


def another_tensor(program: Program, index: int, kept: list[torch.Tensor]) -> torch.Tensor:
    if index % 3 == 0:
        program.layer.weight.grad = torch.full((3, 3), float(index))
    return torch.randn(3, 3) if index < 5 or index % 3 else program.gradient()


@pytest.mark.parametrize("choose", [now_and_then, the_same_from_then_on, a_view, another_tensor])
@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_argument_inside_a_gradient_is_used_as_in_eager(
    writes: bool, forgets: bool, choose: Callable[[Program, int, list[torch.Tensor]], torch.Tensor]
) -> None:
    theirs = Program(writes=writes, forgets=forgets, graphed=False)
    mine = Program(writes=writes, forgets=forgets, graphed=True)
    expected, found = theirs.run(choose), mine.run(choose)
    assert [index for index, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)] == []
    assert mine.graphed is not None and mine.graphed.report().replays > 0


Used = Callable[[nn.Parameter, torch.Tensor], torch.Tensor]


def reads_and_drops(weight: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None
    read = (weight.grad * 3).sum() + (x * WEIGHTS).sum()
    weight.grad = None
    (weight * x).sum().backward()  # type: ignore[no-untyped-call]
    return read


def reads(weight: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None
    return (weight.grad * 3).sum() + (x * WEIGHTS).sum()


def adds(weight: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
    (weight * x).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    return (weight.grad * WEIGHTS).sum()


WEIGHTS = torch.arange(1.0, 5.0)


@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("use", [reads_and_drops, reads, adds])
def test_argument_may_have_the_address_of_a_gradient(use: Used, others: int) -> None:
    """The old gradient is copied there before a launch, and only the launch reads the argument."""

    def program() -> tuple[nn.Parameter, list[torch.Tensor], Callable[..., torch.Tensor]]:
        weight = nn.Parameter(torch.ones(4))
        buffers = [torch.full((4,), 1.0 + index) for index in range(3)]
        return weight, buffers, lambda x, *batch: use(weight, x) + sum(one.sum() for one in batch)

    (weight, theirs, eager), (found, mine, step) = program(), program()
    graphed = GraphedStep(step, device=CpuDevice())
    for index in range(24):
        first, second = (0, None) if index < 6 else (index % 3, index // 3 % 4)
        weight.grad, found.grad = theirs[first], mine[first]
        free = second is None or second == 3 or second == first
        given = [torch.full((4,), float(index))] * 2 if free else [theirs[second], mine[second]]
        batch = [torch.full((2,), float(index + one)) for one in range(others)]
        assert torch.equal(graphed(given[1], *batch), eager(given[0], *batch))
        assert weight.grad is not None and found.grad is not None and torch.equal(weight.grad, found.grad)
        assert all(map(torch.equal, mine, theirs))
    assert graphed.report().replays > 0
