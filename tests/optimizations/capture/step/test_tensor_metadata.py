"""Changed metadata of a tensor is noticed although object and address stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches, loss_of
from torch import nn

from optimizations.capture.step.graphed_step import GraphedStep

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}
CALLS, CHANGED_BEFORE = 12, (6, 8)


class Training:
    """A step of five layers. `zero` is what becomes of gradients: added to, set to None or zero, or None outside."""

    def __init__(self, zero: str, optimizer: str, inside: Callable[[Training], None] = lambda made: None) -> None:
        torch.manual_seed(3)
        sizes = (8, 16), (16, 16), (16, 16), (16, 16), (16, 4)
        self.model = nn.Sequential(*[nn.Linear(*size) for size in sizes])
        self.model.register_buffer("shift", torch.randn(16, 16) * 0.2)
        self.turned = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.zero, self.inside = zero, inside
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.zero in ("to None", "to zero"):
            self.clear(to_none=self.zero == "to None")
        x = self.model[1](self.model[0](batch["x"])) @ self.model.shift
        loss = loss_of(self.model[2:], {"x": x, "y": batch["y"]})  # type: ignore[index]
        loss = loss + 0.01 * (self.turned.imag.square().sum() + (self.turned @ self.turned).real.sum())
        loss.backward()
        self.inside(self)
        self.optimizer.step()
        return loss.detach()

    def clear(self, *, to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none=to_none)
        self.turned.grad = None

    @property
    def weight(self) -> Any:
        """One in the middle."""
        return self.model[2].weight

    def state(self) -> list[Any]:
        found: list[Any] = []
        for one in (*self.model.parameters(), self.turned):
            gradient = one.grad
            found.append(one.detach().resolve_conj().clone())
            if gradient is not None:
                found.append((type(gradient), gradient.stride(), gradient.requires_grad, gradient.is_conj()))
                found.append(gradient.detach().resolve_conj().clone())
        kept = self.optimizer.state.values()
        return [*found, *(one.clone() for held in kept for one in held.values() if isinstance(one, torch.Tensor))]


Change = Callable[[Training], Any]


def history(made: Training, change: Change, *, graphed: bool) -> tuple[list[Any], Any]:
    """Return losses and states of all calls up to the first that raises, and the step's report."""
    step: Any = GraphedStep(made.step, device=CpuDevice()) if graphed else made.step
    found: list[Any] = []
    for index, batch in enumerate(batches("cpu", CALLS)):
        if index in CHANGED_BEFORE:
            change(made)
        if made.zero == "outside":
            made.clear()
        try:
            found.append([step(*batch), *made.state()])
        except RuntimeError as error:
            found.append([str(error)])
            break
    return found, step.report() if graphed else None


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and mine.shape == theirs.shape and torch.equal(mine, theirs)
    return bool(mine == theirs)


def assert_as_in_eager(make: Callable[[], Training], change: Change) -> Any:
    expected, _ = history(make(), change, graphed=False)
    found, report = history(make(), change, graphed=True)
    assert len(found) == len(expected)
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert len(mine) == len(theirs) and all(map(same, mine, theirs)), index
    return report


def other_memory(gradient: torch.Tensor) -> None:
    gradient.untyped_storage().resize_(1 << 16)


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "t_": lambda gradient: gradient.t_(),
    "requires_grad_": lambda gradient: gradient.requires_grad_(),
    "elsewhere, transposed": lambda gradient: setattr(gradient, "data", torch.full((16, 16), 0.1).t()),
    "other memory": other_memory,
}


def changed_gradient(change: Callable[[Any], Any]) -> Change:
    def of(made: Training) -> None:
        with torch.no_grad():
            change(made.weight.grad)

    return of


@pytest.mark.filterwarnings("ignore:.*runs some of its calls without a CUDA graph")  # zero_grad sets requires_grad
@pytest.mark.parametrize("change", sorted(GRADIENTS))
@pytest.mark.parametrize("zero", ["added to", "to None", "to zero", "outside"])
def test_gradient_with_changed_metadata_equals_eager(zero: str, change: str) -> None:
    """This includes a gradient that an earlier call made and that is None before the next."""
    report = assert_as_in_eager(lambda: Training(zero, "sgd"), changed_gradient(GRADIENTS[change]))
    assert report.replays >= 2


def halved(made: Training) -> None:
    for one in made.model.parameters():
        one.grad.data = one.grad.data * 0.5  # type: ignore[union-attr]


INSIDE: dict[str, Change] = {
    "data": halved,
    "t_": lambda made: made.weight.grad.t_(),
    "requires_grad_": lambda made: made.weight.grad.requires_grad_(not made.weight.grad.requires_grad),
}


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("inside", sorted(INSIDE))
@pytest.mark.parametrize("zero", ["added to", "to None", "outside"])
def test_step_that_changes_gradient_metadata_is_refused(zero: str, inside: str) -> None:
    """The graph would continue with the memory and metadata from before the change."""
    report = assert_as_in_eager(lambda: Training(zero, "sgd", INSIDE[inside]), lambda made: None)
    if zero == "added to":
        assert report.replays == 0 and ".grad itself" in str(report.refusals[0])
    else:
        assert report.replays == CALLS - 3


OTHERS: dict[str, Change] = {
    "a parameter stands for conjugates": lambda made: setattr(made.turned, "data", made.turned.data.conj()),
    "a gradient stands for conjugates": lambda made: setattr(made.turned.grad, "data", made.turned.grad.data.conj()),
    "a buffer is transposed": lambda made: made.model.shift.t_(),
    "a parameter is transposed": lambda made: setattr(made.weight, "data", made.weight.data.t()),
}


@pytest.mark.parametrize("other", sorted(OTHERS))
@pytest.mark.parametrize("zero", ["added to", "to None"])
def test_other_changed_metadata_equals_eager(zero: str, other: str) -> None:
    assert_as_in_eager(lambda: Training(zero, "sgd"), OTHERS[other])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_moved_optimizer_states_are_noticed_before_the_launch(optimizer: str) -> None:
    def moved(made: Training) -> None:
        for held in made.optimizer.state.values():
            for one in held.values():
                if isinstance(one, torch.Tensor):
                    one.data = one.data * 0.5

    def put_anew(made: Training) -> None:
        held = made.optimizer.state[made.weight]
        for name, one in held.items():
            if isinstance(one, torch.Tensor) and one.ndim:
                held[name] = one * 0.5

    for change in (moved, put_anew):
        assert assert_as_in_eager(lambda: Training("to None", optimizer), change).replays == CALLS - 3
