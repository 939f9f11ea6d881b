"""Calls of compiled modules whose parameters are bound, with the FX graph run in place of Inductor's code.

So compiled results must be eager's bit for bit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from binding_programs import Model
from torch import nn

import optimizations
from optimizations import torch_internals
from optimizations.calls import bound as bound_module
from optimizations.calls.bound import READS_BEFORE
from optimizations.report import BindingReport

X = torch.arange(8.0).reshape(2, 4) / 7


class Runner:
    """Stands in for Inductor, and notes the number of arguments and their identities in each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def compile_fx(
        self, graph_module: torch.fx.GraphModule, inputs: Sequence[Any], **settings: Any
    ) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self.calls.append(tuple(map(id, arguments)))
            return graph_module.forward(*arguments)

        return run


@pytest.fixture
def runner(fresh_encore: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """Replace Inductor, and switch gradients off."""
    runner = Runner()
    monkeypatch.setattr(torch_internals, "compile_fx", runner, raising=False)
    with torch.no_grad():
        yield runner


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The modules that were read in Python, outermost ones only.

    The garbage is only collected where a test says so: a full collection may release bindings.
    """
    read: list[Any] = []
    stock = bound_module.fetch

    def fetch(module: Any, *rest: Any) -> None:
        read.append(module)
        stock(module, *rest)

    monkeypatch.setattr(bound_module, "fetch", fetch)
    collects = gc.isenabled()
    gc.disable()
    yield read
    if collects:
        gc.enable()


HELD = 3 * 8
"""Parameters and buffers that the model's evaluation reads: two of `linear`, four of `norm`, `scale`, `offset`."""


def compiled(module: Any, **options: Any) -> Any:
    return torch.compile(module, backend="encore", fullgraph=True, options=options or None)


def same(left: Any, right: Any) -> bool:
    return bool(torch.equal(left, right))


def serve(run: Any, model: Any, calls: int = 3, x: torch.Tensor = X) -> None:
    """Check that so many calls compute what the module does."""
    for _ in range(calls):
        assert same(run(x), model(x))


def bound(model: Any = None, x: torch.Tensor = X) -> tuple[Any, Any]:
    """Return a module, by default a new `Model`, and its compiled call, whose parameters are bound."""
    model = model or Model().eval()
    run = compiled(model)
    serve(run, model, READS_BEFORE + 1, x)
    return model, run


def binding() -> BindingReport:
    """Return the report of the only graph's binding."""
    (report,) = optimizations.report()
    assert report.binding is not None
    return report.binding


ONE = torch.ones(1)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift
