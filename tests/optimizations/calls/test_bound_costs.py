"""When parameters are read and when they are compared in C++: what one costs is weighed against the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bound_calls import ONE, Clock, Scaled, clock, compiled, reads, runner, same, settle
from torch import nn

from optimizations.calls import bound as bound_module
from optimizations.calls.bound import PATIENCE
from optimizations.torch_internals.dictionary_writes import ComparedAfterWrites
from optimizations.torch_internals.identity_guard import same_tensors

__all__ = ["clock", "reads", "runner"]

pytestmark = pytest.mark.usefixtures("runner")


def making_takes(monkeypatch: pytest.MonkeyPatch, clock: Clock, time: int) -> None:
    """To make a comparison takes so long; whatever else is measured takes 1."""

    def make(*arguments: Any) -> Any:
        clock.now += time - 1
        return same_tensors(*arguments)

    monkeypatch.setattr(bound_module, "same_tensors", make)


def serve(run: Any, model: nn.Module, calls: int) -> None:
    for _ in range(calls):
        assert same(run(ONE), model(ONE))


@torch.no_grad()
def test_reading_goes_on_after_a_comparison_that_did_not_pay(
    clock: Clock, reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    making_takes(monkeypatch, clock, 10)
    model = Scaled()
    run = compiled(model)
    settle(lambda: run(ONE))
    for weight in (2, 4, 8):
        reads.clear()
        serve(run, model, 3)
        assert reads == []
        model.scale = nn.Parameter(model.scale + 1)
        serve(run, model, 1 + 10 * weight + 3)
        assert len(reads) == 1 + 10 * weight


@torch.no_grad()
def test_comparison_that_paid_is_made_again_after_equal_reading(
    clock: Clock, reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    making_takes(monkeypatch, clock, 10)
    model = Scaled()
    run = compiled(model)
    settle(lambda: run(ONE))
    for _ in range(3):
        serve(run, model, 11)  # as many as reading ten times takes
        reads.clear()
        model.scale = nn.Parameter(model.scale + 1)
        serve(run, model, 40)
        assert len(reads) == 1 + 10


@torch.no_grad()
def test_repeatedly_exchanged_parameters_are_always_compared(
    clock: Clock, reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike buffers that may be results of a graph: a program that swaps parameters may go on with some."""
    making_takes(monkeypatch, clock, 10)
    model = Scaled()
    run = compiled(model)
    settle(lambda: run(ONE))
    weight = 1
    while weight <= 4 * PATIENCE:
        model.scale = nn.Parameter(model.scale + 1)
        weight *= 2
        serve(run, model, 1 + 10 * weight)
    reads.clear()
    serve(run, model, 4)
    assert reads == []


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.register_buffer("scale", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


@torch.no_grad()
def test_repeatedly_exchanged_buffers_are_compared_no_more(
    clock: Clock, reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be results of a graph, which what is bound would keep alive."""
    making_takes(monkeypatch, clock, 10)
    model = Buffered()
    run = compiled(model)
    settle(lambda: run(ONE))
    weight = 1
    while weight <= PATIENCE:
        reads.clear()
        serve(run, model, 2)
        assert reads == [], "compared until then"
        model.scale = model.scale + 1
        weight *= 2
        serve(run, model, 1 + 10 * weight)
    model.scale = model.scale + 1
    reads.clear()
    serve(run, model, 8 * weight)
    assert len(reads) == 8 * weight


@torch.no_grad()
def test_failing_comparison_without_an_exchange_is_renewed(
    clock: Clock, reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def make(*arguments: Any) -> Any:
        made.append(same_tensors(*arguments))
        return made[-1] if len(made) > 1 else ComparedAfterWrites(lambda dictionaries: False, ())

    monkeypatch.setattr(bound_module, "same_tensors", make)
    model = Scaled()
    run = compiled(model)
    settle(lambda: run(ONE))
    serve(run, model, 8)
    reads.clear()
    serve(run, model, 4)
    assert reads == [] and len(made) == 2
