"""Attributes that a graphed callable binds share memory with results and arguments as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs_on_cpu import CpuDevice
from test_callables_differentiation import batches, same
from torch import nn

from optimizations.capture.callables.graph_callables import graph_callables


class Keeps(nn.Module):
    """Keeps two tensors of each call."""

    def __init__(self, keep: Callable[[Keeps, torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear, self.keep = nn.Linear(3, 3), keep
        self.first: torch.Tensor | None = None
        self.second: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        result = self.linear(x * 1)
        self.keep(self, x, result)
        return result, result.detach()[1], x.detach()


def of_a_result(module: Keeps, x: torch.Tensor, result: torch.Tensor) -> None:
    module.first, module.second = result.detach(), result.detach()[0]


def each_other(module: Keeps, x: torch.Tensor, result: torch.Tensor) -> None:
    module.first = module.second = result.detach() * 2


def of_an_argument(module: Keeps, x: torch.Tensor, result: torch.Tensor) -> None:
    module.first, module.second = (x.detach() if x.requires_grad else x), x.detach()[0]


def outcome(module: Keeps, call: Any, *, requires_grad: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    found: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    for x in batches(4, requires_grad=requires_grad):
        results = call(x)
        assert module.first is not None and module.second is not None
        tensors = [*results, module.first, module.second, x]
        results[0].sum().backward()
        for index, tensor in enumerate(tensors):
            with torch.no_grad():
                tensor.view(-1)[index % tensor.numel()] += 5.0
        found += [tensor.detach().clone() for tensor in [*tensors, *kept]]
        kept.append(module.first)
    return found


@pytest.mark.parametrize("outputs", ["static", "copied"])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("keep", [of_a_result, each_other, of_an_argument])
def test_what_is_written_into_one_shows_in_the_others(keep: Any, requires_grad: bool, outputs: Any) -> None:
    module, reference = Keeps(keep), Keeps(keep)
    sample = batches(1, requires_grad=requires_grad)
    group = graph_callables(module, sample, outputs=outputs, device=CpuDevice())
    found = outcome(module, module, requires_grad=requires_grad)
    assert same(found, outcome(reference, reference, requires_grad=requires_grad))
    assert group.calls_without_graph == 0
