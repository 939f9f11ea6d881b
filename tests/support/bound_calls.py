"""Calls of compiled modules whose parameters are bound, with the FX graph run in place of Inductor's code.

So compiled results must be eager's bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from optimizations import torch_internals
from optimizations.calls import bound as bound_module
from optimizations.calls.bound import READS_BEFORE

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
def runner(fresh_encore: None, monkeypatch: pytest.MonkeyPatch) -> Runner:
    runner = Runner()
    monkeypatch.setattr(torch_internals, "compile_fx", runner, raising=False)
    return runner


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modules that were read in Python, outermost ones only."""
    read: list[Any] = []
    stock = bound_module.fetch

    def fetch(module: Any, *rest: Any) -> None:
        read.append(module)
        stock(module, *rest)

    monkeypatch.setattr(bound_module, "fetch", fetch)
    return read


HELD = 3 * 8
"""Parameters and buffers that the model's evaluation reads: two of `linear`, four of `norm`, `scale`, `offset`."""


def compiled(module: Any, **options: Any) -> Any:
    return torch.compile(module, backend="encore", fullgraph=True, options=options or None)


def same(left: Any, right: Any) -> bool:
    return bool(torch.equal(left, right))


def settle(call: Callable[[], Any]) -> None:
    for _ in range(READS_BEFORE + 1):
        call()


ONE = torch.ones(1)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift
