"""Gradients of graphed callables equal eager's for every way to compute them, whatever runs before the backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from callable_parts import Views, batches, graphed
from torch import nn

from optimizations.capture.callables.slot import BackwardRefused


class Ends(nn.Module):
    """Ends in an operator whose backward reads its result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x)) * self.scale).sigmoid()


BETWEEN: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "the result is written": lambda module, result: result.mul_(2),
    "a view of it is written": lambda module, result: result[0].mul_(2),
    "a weight is written": lambda module, result: torch.optim.SGD([module.second.weight], lr=0.1).step(),
    "a buffer is written": lambda module, result: module.scale.mul_(2),
}


@pytest.mark.parametrize("name", sorted(BETWEEN))
def test_write_to_saved_memory_before_the_backward_is_an_error(name: str) -> None:
    """The graph raises the same error as eager."""
    module = Ends()
    reference = copy.deepcopy(module)
    for one in (reference, module):
        if one is module:
            graphed(module, batches(1))
        one.second.weight.grad = torch.ones(3, 3)
        result = one(torch.randn(2, 3))
        with torch.no_grad():
            BETWEEN[name](one, result)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_write_into_a_shared_result_is_an_error_of_the_backward() -> None:
    """Autograd records the views that a callable makes in eager, but not views of a graph's memory."""
    module = Views(3, 3)
    graphed(module, batches(1))
    result, row, _ = module(torch.randn(2, 3))
    with torch.no_grad():
        row.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (result.sum() + row.sum()).backward()


def test_write_into_a_part_of_a_result_is_differentiated() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    call = graphed(lambda x: (x @ weight).split(1), batches(1))
    first, second = call[0](x := torch.randn(2, 3))
    first.mul_(2)
    (first.sum() + second.sum()).backward()
    assert weight.grad is not None and torch.allclose(weight.grad, (2 * x[0] + x[1])[:, None].expand(3, 3))
    assert [one.replays for one in call.report()] == [1, 1]


BACKWARDS: dict[str, tuple[Callable[[Any, nn.Linear, torch.Tensor], Any], str]] = {
    "its weight moved": (
        lambda call, module, loss: setattr(module.weight, "data", module.weight.data.clone()),
        "was moved between its forward and its backward",
    ),
    "its graphs were freed": (lambda call, module, loss: call.close(), "comes after its graphs were freed"),
    "it ran": (lambda call, module, loss: loss.backward(retain_graph=True), r"called a second time.* in one backward"),
}


@pytest.mark.parametrize("name", sorted(BACKWARDS))
def test_impossible_backward_is_an_error(name: str) -> None:
    before, words = BACKWARDS[name]
    module = nn.Linear(3, 3)
    call = graphed(module, batches(1, requires_grad=True))
    loss = module(torch.randn(2, 3, requires_grad=True)).sum()
    before(call, module, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a weight that moved
        module(torch.randn(2, 3, requires_grad=True))
    with pytest.raises(BackwardRefused, match=f"the backward of callable 1 .*{words}"):
        loss.backward()


def test_gradient_of_a_gradient_is_refused() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    graphed(module, [(torch.randn(2, 3, requires_grad=True),)])
    for _ in range(2):
        x = torch.randn(2, 3, requires_grad=True)
        with pytest.raises(BackwardRefused, match=r"cannot be differentiated \(create_graph=True\)"):
            torch.autograd.grad(module(x).sum(), x, create_graph=True)
        module(x).sum().backward()


class Measures(torch.autograd.Function):
    """Keeps the largest gradient that passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        ctx.largest = largest
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        torch.maximum(ctx.largest, gradient.abs().max(), out=ctx.largest)
        return gradient, None


def test_buffer_writes_of_a_backward_increment_versions() -> None:
    largest = torch.zeros(())
    call = graphed(lambda x: Measures.apply(x, largest), batches(1, requires_grad=True))  # type: ignore[no-untyped-call]
    loss = (torch.randn(3, requires_grad=True) * largest).sum()
    result = call[0](batches(1, requires_grad=True)[0])
    before = largest._version
    (result * 7).sum().backward()
    assert largest.item() == 7 and largest._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
