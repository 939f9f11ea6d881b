"""Gradients that the program holds, exchanges, moves or saves between the calls of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches, loss_of, network

from optimizations.capture.step.graphed_step import GraphedStep

ZERO: dict[str, Callable[[torch.nn.Module], None]] = {
    "set to None": lambda model: model.zero_grad(),
    "set to zero": lambda model: model.zero_grad(set_to_none=False),
    "added to": lambda model: None,
}


class Training:
    """A step that leaves gradients. `held` is what the program keeps between its calls."""

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


def exchanged(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)


def exchanged_and_held(training: Training) -> None:
    exchanged(training)
    training.held = training.gradients()


def in_a_flat_buffer(training: Training) -> None:
    parameters = list(training.model.parameters())
    flat = torch.zeros(sum(one.numel() for one in parameters))
    for parameter, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    training.held = [flat]


CHANGES = [moved, exchanged, exchanged_and_held, in_a_flat_buffer]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("zero", ZERO)
def test_gradients_and_references_to_them_equal_eager(zero: str, change: Callable[[Training], None]) -> None:
    mine, theirs = Training(zero), Training(zero)
    step = GraphedStep(mine.step, device=CpuDevice())
    for index, batch in enumerate(batches("cpu", 10)):
        assert torch.equal(step(*batch), theirs.step(*batch)), index
        for one, other in [(mine.gradients(), theirs.gradients()), (mine.held, theirs.held)]:
            assert len(one) == len(other) and all(map(torch.equal, one, other)), index
        if index % 3 == 0:
            change(mine)
            change(theirs)
    assert step.report().replays >= (1 if mine.held else 6)


def test_referenced_gradient_stays_and_others_may_move() -> None:
    mine = Training("added to")
    step = GraphedStep(mine.step, device=CpuDevice())
    given = batches("cpu", 8)
    for batch in given[:6]:
        step(*batch)
    recorded = list(map(id, mine.gradients()))
    exchanged(mine)
    step(*given[6])
    assert list(map(id, mine.gradients())) == recorded
    exchanged_and_held(mine)
    step(*given[7])
    assert all(one is other for one, other in zip(mine.gradients(), mine.held, strict=True))
    assert not set(recorded) & set(map(id, mine.held))


def backward_behind_the_next_call(training: Training, call: Callable[[], Any]) -> None:
    """What autograd saved of a gradient is written by the next call."""
    gradient = training.gradients()[0]
    (torch.ones_like(gradient, requires_grad=True) * gradient).sum().backward()
    saved = (torch.ones_like(gradient, requires_grad=True) * gradient).sum()
    call()
    saved.backward()


@pytest.mark.parametrize("zero", ZERO)
def test_backward_after_a_call_equals_eager(zero: str) -> None:
    """What a call adds to is an error in such a backward, and what it drops is left as it was."""
    mine = Training(zero)
    step = GraphedStep(mine.step, device=CpuDevice())
    *before, last = batches("cpu", 8)
    for batch in before:
        step(*batch)
    fails = pytest.raises(RuntimeError, match="modified by an inplace operation")
    with contextlib.nullcontext() if zero == "set to None" else fails:
        backward_behind_the_next_call(mine, lambda: step(*last))


HOLDS: dict[str, Callable[[torch.Tensor], object]] = {
    "the tensor": lambda gradient: gradient,
    "a view": lambda gradient: gradient.view(-1),
    "what shares its memory": lambda gradient: gradient.detach(),
    "its storage": lambda gradient: gradient.untyped_storage(),
}


def _memory_of(held: Any) -> tuple[torch.UntypedStorage, int]:
    return (held, 0) if isinstance(held, torch.UntypedStorage) else (held.untyped_storage(), held.storage_offset())


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
    assert torch.equal(torch.tensor([]).set_(*_memory_of(kept), then.shape), then)
    assert step.report().replays == replays
    (refusal,) = step.report().refusals
    assert "holds the gradient of" in refusal.reason and refusal.reason.count(".bias") == 1
    del kept
    for batch in given[9:]:
        step(*batch)
    assert step.report().replays == replays + 3


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
