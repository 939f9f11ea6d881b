"""Attributes that the first call of a graphed callable adds are bound by launches; a dict that it fills is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations.capture.callables.graph_callables import graph_callables
from optimizations.capture.step.observer import StepRefused


class Adds(nn.Module):
    """Keeps in each call what `keep` does, in a dict that is empty before the first, or in an attribute."""

    def __init__(self, keep: Callable[[Adds, torch.Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear, self.keep = nn.Linear(3, 3), keep
        self.scale = nn.Parameter(torch.ones(3))
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.keep(self, y)
        return y.relu()


def one_entry(module: Adds, y: torch.Tensor) -> None:
    module.kept["largest"] = y.max()


def an_attribute(module: Adds, y: torch.Tensor) -> None:
    module.largest = y.max()


def outcome(module: Adds, call: Callable[..., Any]) -> list[Any]:
    torch.manual_seed(3)
    found: list[Any] = []
    for _ in range(4):
        y = call(torch.randn(2, 3))
        kept = [*module.kept.values(), *([vars(module)["largest"]] if "largest" in vars(module) else [])]
        (y.sum() + sum(tensor.sum() for tensor in kept)).backward()
        found += [tensor.detach().tolist() for tensor in [*kept, y]]
        found += [None if one.grad is None else one.grad.tolist() for one in module.parameters()]
        kept.clear()
    return found


def test_launches_bind_an_attribute_that_the_first_call_adds() -> None:
    plain, module = Adds(an_attribute), Adds(an_attribute)
    group = graph_callables([module], [(torch.ones(2, 3),)], device=CpuDevice())
    assert not hasattr(module, "largest")
    assert outcome(module, group[0]) == outcome(plain, plain)
    assert group.calls_without_graph == 0


def test_dict_that_the_first_call_fills_is_refused_before_it() -> None:
    plain, module = Adds(one_entry), Adds(one_entry)
    with pytest.raises(StepRefused, match="call it once, with the first batch, before graph_callables"):
        graph_callables([module], [(torch.ones(2, 3),)], device=CpuDevice())
    assert not module.kept
    for one in (plain, module):
        one(torch.ones(2, 3))
    group = graph_callables([module], [(torch.ones(2, 3),)], device=CpuDevice())
    assert outcome(module, group[0]) == outcome(plain, plain)
    assert group.calls_without_graph == 0


def test_weight_of_an_added_attribute_is_not_written_early() -> None:
    def square_of_the_scale(module: Adds, y: torch.Tensor) -> None:
        module.largest = module.scale.square().sum()

    module = Adds(square_of_the_scale)
    group = graph_callables([module], [(torch.ones(2, 3),)], device=CpuDevice())
    (module(torch.ones(2, 3)).sum() + module.largest).backward()
    loss = module(torch.ones(2, 3)).sum() + module.largest
    assert group.report()[0].replays, "a graph's"
    with torch.no_grad():
        module.scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
