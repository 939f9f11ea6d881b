"""Numbers among a step's arguments that its code never reads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs_on_cpu import CpuDevice
from step_parts import batches, loss_of, network

from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.unread_arguments import unread_arguments

CALLS = 14


def of_the_caller(text: str) -> int:
    """As libraries for tables take variables of their caller."""
    found: int = sys._getframe(1).f_locals[text[1:]]
    return found


class Loop:
    """A model and what trains it, as classes of training libraries have them."""

    def __init__(self) -> None:
        self.model = network("cpu")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def update(self, loss: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.update(loss_of(self.model, batch))

    def named(self, batch: dict[str, torch.Tensor], *, batch_idx: int = 0, phase: str = "") -> torch.Tensor:
        return self.update(loss_of(self.model, batch))

    def scaled(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.update(loss_of(self.model, batch) * (1 + batch_idx % 2))

    def scaled_inside(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        def scale() -> int:
            return 1 + batch_idx % 2

        return self.update(loss_of(self.model, batch) * scale())

    def scaled_by_locals(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        key = "batch" + "_" + "idx"
        return self.update(loss_of(self.model, batch) * (1 + locals()[key] % 2))

    def scaled_by_text(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.update(loss_of(self.model, batch) * (1 + eval("batch_idx % 2")))  # noqa: S307

    def scaled_by_a_text(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.update(loss_of(self.model, batch) * (1 + of_the_caller("@batch_idx") % 2))

    def short(self, batch: dict[str, torch.Tensor], i: int) -> torch.Tensor:
        return self.update(loss_of(self.model, batch))

    def handed_on(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.scaled(batch, batch_idx)


def run(name: str, call: Callable[[Any, Any, int], torch.Tensor], *, graphed: bool) -> tuple[list[torch.Tensor], Any]:
    loop = Loop()
    step: Any = getattr(loop, name)
    if graphed:
        step = GraphedStep(step, device=CpuDevice())
    losses = [call(step, *batch, index).detach() for index, batch in enumerate(batches("cpu", CALLS))]
    return [*losses, *(parameter.detach() for parameter in loop.model.parameters())], step


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("training_step", lambda step, batch, index: step(batch, index)),
        ("training_step", lambda step, batch, index: step(batch, batch_idx=index)),
        ("training_step", lambda step, batch, index: step(batch=batch, batch_idx=float(index))),
        ("short", lambda step, batch, index: step(batch, index)),
        ("named", lambda step, batch, index: step(batch, batch_idx=index, phase=f"train {index}")),
    ],
)
def test_a_number_that_no_code_reads_makes_no_other_signature(
    name: str, call: Callable[[Any, Any, int], torch.Tensor]
) -> None:
    expected, _ = run(name, call, graphed=False)
    found, step = run(name, call, graphed=True)
    assert all(map(torch.equal, found, expected))
    report = step.report()
    assert report.replays >= CALLS - 5 and len(report.recordings) == 1 and not report.refusals


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize(
    "name", ["scaled", "scaled_inside", "scaled_by_locals", "scaled_by_text", "scaled_by_a_text", "handed_on"]
)
def test_a_number_that_code_reads_counts(name: str) -> None:
    def call(step: Any, batch: Any, index: int) -> torch.Tensor:
        given: torch.Tensor = step(batch, index)
        return given

    expected, _ = run(name, call, graphed=False)
    found, _ = run(name, call, graphed=True)
    assert all(map(torch.equal, found, expected))


def test_a_tensor_that_no_code_reads_is_left_as_it_is() -> None:
    unread = unread_arguments(Loop().training_step)
    assert unread is not None and unread.names == {"batch_idx"}
    batch, tensor = {"x": torch.zeros(1)}, torch.zeros(1)
    assert unread.left_out((batch, 3), {}) == ((batch, None), {})
    assert unread.left_out((batch, tensor), {}) == ((batch, tensor), {})
    assert unread.left_out((batch,), {"batch_idx": True}) == ((batch,), {"batch_idx": None})
    assert unread.left_out((), {"batch": 3}) == ((), {"batch": 3})


def test_another_argument_of_the_same_name_is_left() -> None:
    def step(batch: Any, batch_idx: int, /, **others: Any) -> Any:
        return batch, others

    unread = unread_arguments(step)
    assert unread is not None and unread.left_out((1, 2), {"batch_idx": 3}) == ((1, None), {"batch_idx": 3})


def test_code_that_is_exchanged_reads_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(batch: Any, batch_idx: int) -> Any:
        return batch

    def other(batch: Any, batch_idx: int) -> Any:
        return batch_idx

    unread = unread_arguments(step)
    assert unread is not None and unread.left_out((1, 2), {}) == ((1, None), {})
    monkeypatch.setattr(step, "__code__", other.__code__)
    assert unread.left_out((1, 2), {}) == ((1, 2), {})


def test_what_is_no_function_of_python_has_none() -> None:
    assert unread_arguments(print) is None and unread_arguments(Loop) is None
    assert unread_arguments(lambda *args, **kwargs: None) is None
