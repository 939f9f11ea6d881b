"""When parameters are read and when they are compared in C++: what one costs is weighed against the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bound_calls import ONE, Scaled, compiled, reads, runner, same, settle
from torch import nn

from optimizations.calls import bound as bound_module
from optimizations.calls.bound import PATIENCE, WORTH
from optimizations.torch_internals.dictionary_writes import ComparedAfterWrites
from optimizations.torch_internals.identity_guard import same_tensors

__all__ = ["reads", "runner"]

pytestmark = pytest.mark.usefixtures("runner")


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.register_buffer("scale", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


def exchange(model: nn.Module) -> None:
    model.scale = type(model.scale)(model.scale + 1)


def serve(run: Any, model: nn.Module, calls: int) -> None:
    for _ in range(calls):
        assert same(run(ONE), model(ONE))


@torch.no_grad()
@pytest.mark.parametrize("served", [3, WORTH])
def test_reading_is_longer_after_comparisons_without_gain(reads: list[Any], served: int) -> None:
    model = Scaled()
    run = compiled(model)
    settle(lambda: run(ONE))
    for losses in (1, 2, 3):
        reads.clear()
        serve(run, model, served)
        assert reads == []
        exchange(model)
        expected = 1 + (WORTH if served == WORTH else WORTH << losses)
        serve(run, model, expected + 3)
        assert abs(len(reads) - expected) <= 1


@torch.no_grad()
@pytest.mark.parametrize("kind", [Scaled, Buffered])
def test_buffers_are_compared_no_more_and_parameters_are(reads: list[Any], kind: type[nn.Module]) -> None:
    """Buffers may be results of a graph, which what is bound would keep alive."""
    model = kind()
    run = compiled(model)
    settle(lambda: run(ONE))
    for losses in range(1, PATIENCE + 2):
        exchange(model)
        serve(run, model, 3 + (WORTH << losses))
    reads.clear()
    serve(run, model, 3)
    assert len(reads) == (3 if kind is Buffered else 0)


@torch.no_grad()
def test_failing_comparison_without_an_exchange_is_renewed(reads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def make(*arguments: Any) -> Any:
        made.append(same_tensors(*arguments))
        return made[-1] if len(made) > 1 else ComparedAfterWrites(lambda dictionaries: False, ())

    monkeypatch.setattr(bound_module, "same_tensors", make)
    model = Scaled()
    run = compiled(model)
    settle(lambda: run(ONE))
    serve(run, model, 4 * WORTH)
    reads.clear()
    serve(run, model, 4)
    assert reads == [] and len(made) == 2
