"""Changes by the program of gradients and saved tensors are found before replays return these again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from optimizations.trees.live_results import LiveResults

CHANGES: list[Callable[[torch.Tensor], Any]] = [
    lambda y: y.t_() if y.ndim > 1 else y.unsqueeze_(0).t_(),
    lambda y: y.unsqueeze_(0),
    lambda y: y.requires_grad_(),
    lambda y: y.mul_(torch.ones(1, requires_grad=True)),
    lambda y: y.set_(torch.zeros(2, 3)),
    lambda y: setattr(y, "data", torch.zeros(2, 3)),
    lambda y: setattr(y, "data", y.data[:1]),
    lambda y: setattr(y, "__class__", type("Sub", (torch.Tensor,), {})),
]
"""What C++ sees of a tensor."""

ATTACHED: list[Callable[[torch.Tensor], Any]] = [
    lambda y: setattr(y, "name_of_the_callers_own", 1),
    lambda y: setattr(y, "grad", torch.zeros_like(y)),
    lambda y: (y.requires_grad_(), y.sum().backward(), y.requires_grad_(False)),
    lambda y: (y.requires_grad_(), y.register_hook(torch.neg), y.detach_()),
]
if hasattr(torch.Tensor, "rename_"):  # PyTorch 2.13 removed names of dimensions
    CHANGES.append(lambda y: y.rename_(*"abc"[: y.ndim]))


def after(calls: int, count: int = 3, *, seen: bool = True) -> tuple[LiveResults, list[Any]]:
    """Tensors that were returned so often, with nothing changed but their values."""
    results: list[Any] = [torch.zeros(2, 3), None, *(torch.ones(2, 3) for _ in range(count - 2))]
    live_results = LiveResults(results, seen=seen)
    for _ in range(calls):
        results[0].add_(1)
        assert live_results.changed(results) == []
    return live_results, results


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_change_beyond_values_is_found(change: Callable[[torch.Tensor], Any], calls: int, seen: bool) -> None:
    live_results, results = after(calls, seen=seen)
    change(results[2])
    assert live_results.changed(results) == [2]


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("attach", ATTACHED)
def test_attachment_to_a_known_tensor_is_found(attach: Callable[[torch.Tensor], Any], calls: int) -> None:
    live_results, results = after(calls)
    attach(results[2])
    assert live_results.changed(results) == [2]
    live_results, results = after(calls, seen=False)
    attach(results[2])
    assert live_results.changed(results) == []


@pytest.mark.parametrize("calls", [0, 2])
def test_live_weak_reference_is_found(calls: int) -> None:
    live_results, results = after(calls)
    references = [weakref.ref(results[2])]
    assert live_results.changed(results) == [2]
    references.clear()
    assert live_results.changed(results) == []
