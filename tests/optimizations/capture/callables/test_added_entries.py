"""Entries that the first call of a graphed callable adds to a dict or a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations.capture.callables.graph_callables import graph_callables


class Adds(nn.Module):
    """Keeps in each call what `keep` does, in a dict that is empty before the first."""

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


def several_entries(module: Adds, y: torch.Tensor) -> None:
    module.kept["z"] = y.detach()
    module.kept["square"] = y.square().mean()
    module.kept["a"] = y.detach()[0]
    module.kept["sum"] = y.detach().sum()


def an_attribute(module: Adds, y: torch.Tensor) -> None:
    module.largest = y.max()


def entries(module: Adds) -> list[tuple[str, torch.Tensor]]:
    added = [("largest", largest)] if (largest := vars(module).get("largest")) is not None else []
    return [*module.kept.items(), *added]


def outcome(module: Adds, call: Callable[..., Any], *, clears: bool, first: int = 2) -> list[Any]:
    """Names in their order, values, and gradients; `first`: rows of the first batch."""
    torch.manual_seed(3)
    found: list[Any] = []
    for index in range(5):
        y = call(torch.randn(2 if index else first, 3))
        kept = entries(module)
        (y.sum() + sum(tensor.sum() for _, tensor in kept if tensor.requires_grad)).backward()
        found.append([name for name, _ in kept])
        found += [tensor.detach().tolist() for _, tensor in [*kept, ("", y)]]
        found += [None if one.grad is None else one.grad.tolist() for one in module.parameters()]
        kept.clear()
        if clears:
            module.kept.clear()
    return found


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("keep", [one_entry, several_entries, an_attribute])
def test_graphs_serve_from_the_first_call_and_add_entries(
    keep: Callable[[Adds, torch.Tensor], None], clears: bool
) -> None:
    plain, module = Adds(keep), Adds(keep)
    group = graph_callables([module], [(torch.ones(2, 3),)], device=CpuDevice())
    assert outcome(module, group[0], clears=clears) == outcome(plain, plain, clears=clears)
    assert group.calls_without_graph == 0


@pytest.mark.filterwarnings("ignore:callable 1 runs without its graphs")
@pytest.mark.parametrize("keep", [one_entry, several_entries])
def test_graphs_serve_where_an_uncaptured_call_added_entries(keep: Callable[[Adds, torch.Tensor], None]) -> None:
    plain, module = Adds(keep), Adds(keep)
    group = graph_callables([module], [(torch.ones(2, 3),)], device=CpuDevice())
    assert outcome(module, group[0], clears=False, first=4) == outcome(plain, plain, clears=False, first=4)
    assert group.calls_without_graph <= 2, "the first call, and one that finds what it kept"


@pytest.mark.filterwarnings("ignore:callable 1 runs without its graphs")
def test_what_is_exchanged_in_a_call_without_graphs_is_noticed() -> None:
    module = Adds(one_entry)
    group = graph_callables([module], [(torch.ones(2, 3),)], device=CpuDevice())
    module.linear.weight = nn.Parameter(torch.zeros(3, 3))
    for _ in range(2):
        assert torch.equal(group[0](torch.ones(2, 3)), module.linear.bias.relu().expand(2, 3))
    assert group.calls_without_graph == 2


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
