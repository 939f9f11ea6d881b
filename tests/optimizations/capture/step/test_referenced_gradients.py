"""Gradients that the program references, replaces, moves or saves between the calls of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import Graph, assert_as_eager, batches, loss_of, network

from optimizations.capture.step.graphed_step import GraphedStep

ZERO: dict[str, Callable[[torch.nn.Module], None]] = {
    "set to None": lambda model: model.zero_grad(),
    "set to zero": lambda model: model.zero_grad(set_to_none=False),
    "added to": lambda model: None,
}


class Training:
    """A step that leaves gradients. `held` is what the program references between its calls."""

    def __init__(self, zero: str) -> None:
        self.model = network("cpu")
        self.held: list[torch.Tensor] = []

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            ZERO[zero](self.model)
            loss = loss_of(self.model, batch)
            loss.backward()
            return loss.detach()

        self.step = step

    def gradients(self) -> list[torch.Tensor]:
        return [one.grad for one in self.model.parameters() if one.grad is not None]


def moved(training: Training) -> None:
    for gradient in training.gradients():
        gradient.data = gradient * 0.5


def set_elsewhere(training: Training) -> None:
    for gradient in training.gradients():
        gradient.set_(gradient * 0.5)


def replaced(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)


def replaced_and_referenced(training: Training) -> None:
    replaced(training)
    training.held = training.gradients()


def in_a_flat_buffer(training: Training) -> None:
    parameters = list(training.model.parameters())
    flat = torch.zeros(sum(one.numel() for one in parameters))
    for parameter, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    training.held = [flat]


CHANGES = [moved, set_elsewhere, replaced, replaced_and_referenced, in_a_flat_buffer]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("zero", ZERO)
def test_gradients_and_references_to_them_equal_eager(zero: str, change: Callable[[Training], None]) -> None:
    def program(graph: Graph) -> Iterator[torch.Tensor]:
        training = Training(zero)
        call = graph(training.step)
        for index, batch in enumerate(batches("cpu", 10)):
            yield call(*batch)
            yield from (*training.gradients(), *training.held)
            if index % 3 == 0:
                change(training)

    assert assert_as_eager(program).replays >= {replaced: 6, moved: 5, set_elsewhere: 5}.get(change, 1)


def test_flat_buffers_in_turn_equal_eager() -> None:
    """A call runs uncaptured where a launch would write the buffer that the program holds next to the current one."""

    def program(graph: Graph) -> Iterator[torch.Tensor]:
        torch.manual_seed(7)
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
        sizes = [one.numel() for one in model.parameters()]
        buffers = [torch.zeros(sum(sizes)) for _ in range(2)]

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            model.zero_grad(set_to_none=False)
            loss = loss_of(model, batch)
            loss.backward()
            return loss.detach()

        call = graph(step)
        for index, batch in enumerate(batches("cpu", 16)):
            for parameter, part in zip(model.parameters(), buffers[index % 2].split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)
            yield call(*batch)
            yield from buffers

    assert assert_as_eager(program).replays >= 2


def backward_after_the_next_call(training: Training, call: Callable[[], Any]) -> None:
    """The next call overwrites memory that autograd saved of a gradient."""
    gradient = training.gradients()[0]
    (torch.ones_like(gradient, requires_grad=True) * gradient).sum().backward()
    saved = (torch.ones_like(gradient, requires_grad=True) * gradient).sum()
    call()
    saved.backward()


@pytest.mark.parametrize("zero", ZERO)
def test_backward_after_a_call_equals_eager(zero: str) -> None:
    """A backward of an accumulated gradient raises; a released gradient is unchanged."""
    mine = Training(zero)
    step = GraphedStep(mine.step, device=CpuDevice())
    *before, last = batches("cpu", 8)
    for batch in before:
        step(*batch)
    fails = pytest.raises(RuntimeError, match="modified by an inplace operation")
    with contextlib.nullcontext() if zero == "set to None" else fails:
        backward_after_the_next_call(mine, lambda: step(*last))


HOLDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the tensor": lambda gradient: gradient,
    "a view": lambda gradient: gradient.view(-1),
    "what shares its memory": lambda gradient: gradient.detach(),
}


@pytest.mark.parametrize("hold", HOLDS)
def test_referenced_gradient_is_unchanged_until_released(hold: str) -> None:
    mine, theirs = Training("set to None"), Training("set to None")
    step = GraphedStep(mine.step, device=CpuDevice())
    given = batches("cpu", 12)
    for batch in given[:6]:
        step(*batch)
    kept, then = HOLDS[hold](mine.gradients()[1]), mine.gradients()[1].clone()
    replays = step.report().replays
    for batch in given[6:9]:
        assert torch.equal(step(*batch), theirs.step(*batch))
        assert all(map(torch.equal, mine.gradients(), theirs.gradients()))
    assert torch.equal(kept.view(-1), then.view(-1))
    assert step.report().replays == replays
    (refusal,) = step.report().refusals
    assert "holds the gradient of" in refusal.reason and refusal.reason.count(".bias") == 1
    del kept
    for batch in given[9:]:
        step(*batch)
    assert step.report().replays == replays + 3


@pytest.mark.filterwarnings("ignore:.*runs some of its calls without a CUDA graph")
@pytest.mark.parametrize("is_freed", [False, True])
def test_other_recording_keeps_referenced_gradient(is_freed: bool) -> None:
    """A graph of the same pool may write where the gradients of a later one lie, also after that one was freed."""
    mine = Training("set to None")
    step = GraphedStep(mine.step, device=CpuDevice())
    for size in (6, 6, 6, 6, 7, 7, 7, 7):
        step(*batches("cpu", 1, size)[0])
    later, _ = recordings = list(step._recorder.recordings.tried)
    assert [one.replays for one in recordings] == [2, 1] and len({one.graph.pool for one in recordings}) == 1
    kept, then = mine.gradients()[1], mine.gradients()[1].clone()
    if is_freed:
        step._recorder.recordings.drop([later])
        del later
    recordings.clear()
    for _ in range(2):
        step(*batches("cpu", 1, 6)[0])
        assert torch.equal(kept, then)


def test_versions_of_unwritten_gradients_are_unchanged() -> None:
    mine = Training("set to None")
    apart = torch.nn.Parameter(torch.ones(3))
    apart.grad = torch.ones(3)

    def step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return mine.step(batch), apart * 2

    graphed = GraphedStep(step, device=CpuDevice())
    for batch in batches("cpu", 8):
        graphed(*batch)
    assert graphed.report().replays >= 4 and apart.grad._version == 0


def test_sparse_gradient_from_before_is_named_in_the_refusal() -> None:
    """It has no address."""
    table = torch.nn.Embedding(8, 4, sparse=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        table.zero_grad()
        loss = table(x).square().mean()
        loss.backward()
        return loss.detach()

    graphed = GraphedStep(step, device=CpuDevice())
    with pytest.warns(UserWarning, match="sparse gradient"):
        for index in range(5):
            graphed(torch.tensor([index, 1]))
    gradient = table.weight.grad
    assert gradient is not None and gradient.to_dense()[4].abs().sum() > 0
