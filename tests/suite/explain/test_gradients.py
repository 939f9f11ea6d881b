"""Gradients without autograd's engine are the engine's: the same values, and the same traced backward graphs.

On the CPU, where the engine asks for no device, so that both can be had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from torch import Tensor, nn
from torch.nn import functional

from optimizations import torch_internals
from suite.explain.gradients import without_engine

Results = Sequence[Tensor]


class TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor, constant: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y * constant * factor, x + y

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        product, total = incoming
        return None, product * y + total, None, product * x + total * 2


class TakesNothing(torch.autograd.Function):
    """Its backward gets None for missing gradients, and returns more Nones than there are arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        first, second = incoming
        return None if first is None else first * 2, None if second is None else second * 3, None, None


class WithAnIndex(torch.autograd.Function):
    """One of its results has no gradient, and autograd does not store its shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, uses_index: bool) -> tuple[Tensor, Tensor]:
        ctx.uses_index = uses_index
        return x * 2, x.argmax(-1)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, None]:
        return incoming[0] * (incoming[1].sum() + 2 if ctx.uses_index else 2), None


def used_twice(x: Tensor, y: Tensor) -> Results:
    a = (x * y).sin()
    return (a * x + a.exp() * y + a,)


def broadcast(x: Tensor, y: Tensor) -> Results:
    return (x + y[0], x * y.mean(), y.expand(2, *y.shape) * 3)


def parts(x: Tensor, y: Tensor) -> Results:
    first, _, third = x.unbind(0)[:3]
    return (first * third, y.split(2, dim=1)[0].cos())


def casts(x: Tensor, y: Tensor) -> Results:
    return (functional.linear(x.bfloat16(), y.bfloat16()).float().softmax(-1), x.double() * y)


def own_function(x: Tensor, y: Tensor) -> Results:
    product, total = TwoResults.apply(2.0, x.sin(), torch.ones(4), y)
    return (product, total * x)


def own_function_with_a_result_that_is_not_used(x: Tensor, y: Tensor) -> Results:
    return (TwoResults.apply(3.0, x.sin(), torch.ones(4), y)[0].cos(),)


def takes_nothing(x: Tensor, y: Tensor) -> Results:
    return (TakesNothing.apply(x, y)[1].cos(),)


def result_without_gradient(x: Tensor, y: Tensor) -> Results:
    return (WithAnIndex.apply(x, False)[0] * y,)


def differentiates(x: Tensor, y: Tensor) -> Results:
    """Both inside of `torch.func` and, by `vjp`, after it."""
    _, pull = torch.func.vjp(lambda a, b: (a * b).sin(), x, y)
    return (torch.func.grad(lambda a: (a * y).sin().sum())(x), *pull(x))


def leaf_is_result(x: Tensor, y: Tensor) -> Results:
    return (x, x * 2)


def on_the_way(x: Tensor, y: Tensor) -> Results:
    """The gradient of `between` is requested, too, and continues to `x`."""
    return ((x * 2).sin() * y,)


FUNCTIONS: tuple[Callable[[Tensor, Tensor], Results], ...] = (
    used_twice,
    broadcast,
    parts,
    casts,
    own_function,
    own_function_with_a_result_that_is_not_used,
    takes_nothing,
    result_without_gradient,
    differentiates,
    leaf_is_result,
    on_the_way,
)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_traced_values_equal_the_autograd_engines(function: Callable[[Tensor, Tensor], Results]) -> None:
    torch.manual_seed(1)
    x, y = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    incoming: list[Tensor] = []

    def found() -> tuple[Tensor | None, ...]:
        between = x * 1.5
        results = function(between, y)
        if not incoming:
            incoming.extend(map(torch.randn_like, results))
        return torch.autograd.grad(results, (x, y, between), incoming, allow_unused=True)

    expected = found()
    with without_engine():
        actual = found()
    assert any(each is not None for each in expected)
    for mine, engines in zip(actual, expected, strict=True):
        assert (mine is None) == (engines is None)
        if mine is not None and engines is not None:
            assert (mine.dtype, mine.requires_grad) == (engines.dtype, False)
            assert torch.equal(mine, engines)


class Block(nn.Module):
    """A layer norm, attention, dropout, tied weights, a result that is used in several places, and one number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        x = self.embedding(tokens)
        normed = self.norm(x)
        mixed = functional.scaled_dot_product_attention(normed, self.inner(normed), normed)
        x = functional.dropout(x + mixed, 0.25)
        return functional.linear(self.norm(x), self.embedding.weight), x.mean(0), x.square().mean()


Graph = list[tuple[str, str, str | None]]


def traced(module: nn.Module, argument: Tensor) -> dict[str, Graph]:
    """Forward and backward graphs as AOTAutograd makes them: each node's name, call and line of the program."""
    graphs: dict[str, Graph] = {}

    def keep(kind: str) -> Callable[[torch.fx.GraphModule, Any], Any]:
        def compiler(graph_module: torch.fx.GraphModule, example_inputs: Any) -> Any:
            nodes = graph_module.graph.nodes
            graphs[kind] = [(node.name, node.format_node() or "", node.meta.get("stack_trace")) for node in nodes]
            return make_boxed_func(graph_module.forward)

        return compiler

    def backend(graph_module: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return aot_module_simplified(
            graph_module, example_inputs, fw_compiler=keep("forward"), bw_compiler=keep("backward")
        )

    torch_internals.reset_dynamo()
    with torch_internals.functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False):
        torch.compile(module, backend=backend)(argument)
    return graphs


@contextlib.contextmanager
def autocast(enabled: bool) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        yield


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "autocast"])
def test_traced_backwards_equal_the_engines_nodes_and_lines(mixed: bool) -> None:
    module, tokens = Block(), torch.arange(12).view(3, 4)
    with autocast(mixed):
        expected = traced(module, tokens)
        with without_engine():
            actual = traced(module, tokens)
    assert len(expected["backward"]) > 30
    assert sum(line is not None for _, _, line in expected["backward"]) > 20
    assert actual == expected
