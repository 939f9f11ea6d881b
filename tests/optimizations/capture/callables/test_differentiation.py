"""Gradients of graphed callables equal eager's for every way to compute them, whatever runs before the backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations.capture.callables.graph_callables import GraphedCallables, graph_callables
from optimizations.capture.callables.slot import BackwardRefused


def graphed(callables: Any, sample: Sequence[Any], **options: Any) -> GraphedCallables:
    return graph_callables(callables, sample, device=CpuDevice(), **options)


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) > 0 and all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in zip(some, others, strict=True)
    )


def gradients(*modules: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def batches(count: int = 3, *, requires_grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(2, 3, requires_grad=requires_grad) for _ in range(count)]


def hooks_of_parameters(module: nn.Linear, xs: Sequence[torch.Tensor], kept: list[Any]) -> None:
    for x in xs:
        module(x).square().sum().backward()


def by_autograd_grad(module: nn.Linear, xs: Sequence[torch.Tensor], kept: list[Any]) -> None:
    """Call `torch.autograd.grad` while gradients exist already."""
    module(xs[0]).sum().backward()
    for x in xs[1:]:
        kept += torch.autograd.grad(module(x).square().sum(), list(module.parameters()))


def of_some(module: nn.Linear, xs: Sequence[torch.Tensor], kept: list[Any]) -> None:
    for x in xs:
        module(x).square().sum().backward(inputs=[module.bias])


def thrown_away_and_kept(module: nn.Linear, xs: Sequence[torch.Tensor], kept: list[Any]) -> None:
    for index, x in enumerate(xs):
        module(x).square().sum().backward()
        kept += gradients(module)
        module.zero_grad(set_to_none=index % 2 == 0)


def used_elsewhere_too(module: nn.Linear, xs: Sequence[torch.Tensor], kept: list[Any]) -> None:
    for x in xs:
        (module(x).square().sum() + module.weight.square().sum()).backward()


USES: dict[str, Callable[[nn.Linear, Sequence[torch.Tensor], list[Any]], None]] = {
    "asked for": by_autograd_grad,
    "of some parameters": of_some,
    "thrown away, and kept": thrown_away_and_kept,
    "of a parameter used elsewhere too": used_elsewhere_too,
}


@pytest.mark.parametrize("name", sorted(USES))
def test_gradients_equal_eager_and_stay_valid(name: str) -> None:
    module = nn.Linear(3, 3)
    reference = copy.deepcopy(module)
    call = graphed(module, batches(1))
    xs, found = batches(4), []
    for one in (module, reference):
        kept: list[Any] = []
        USES[name](one, xs, kept)
        found.append([*kept, *gradients(one)])
    assert same(*found)
    assert call.calls_without_graph == 0


@pytest.mark.parametrize("kind", ["changes", "keeps", "after", "of its node"])
def test_parameter_hooks_run_once_with_valid_gradients(kind: str) -> None:
    """Hooks from before the capture must not run in the graph as well: they would run twice."""
    module = nn.Linear(3, 3)
    reference = copy.deepcopy(module)
    kept: list[list[torch.Tensor]] = [[], []]
    nodes: list[Any] = []
    for one, seen in zip((module, reference), kept, strict=True):
        if kind == "changes":
            one.weight.register_hook(lambda gradient: gradient * 2)
        elif kind == "keeps":
            one.weight.register_hook(seen.append)
        elif kind == "of its node":
            node = one.weight.view_as(one.weight).grad_fn.next_functions[0][0]
            node.register_prehook(lambda gradient, seen=seen: seen.append(gradient[0]))
            nodes.append(node)
        else:
            one.weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
    call = graphed(module, batches(1))
    assert kept == [[], []]  # no warm-up run called them
    for x in batches(3):
        hooks_of_parameters(module, [x], [])
        hooks_of_parameters(reference, [x], [])
    assert same(gradients(module), gradients(reference))
    assert kind == "changes" or same(*kept)
    assert call.calls_without_graph == 0


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


class AddsItself(torch.autograd.Function):
    """A product whose backward adds the weight's gradient to a tensor of the weight's own, as fused ones do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(x.t() @ gradient)
        return gradient @ weight.t(), None


BACKWARDS: dict[str, tuple[Callable[[Any, nn.Linear, torch.Tensor], Any], str]] = {
    "its weight moved": (
        lambda call, module, loss: setattr(module.weight, "data", module.weight.data.clone()),
        "was moved between its forward and its backward",
    ),
    "it was given up": (lambda call, module, loss: call.restart(), r"comes after restart\(\)"),
    "its graphs were freed": (lambda call, module, loss: call.close(), "comes after its graphs were freed"),
    "it ran": (lambda call, module, loss: loss.backward(retain_graph=True), "called a second time"),
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


def test_backward_finds_attributes_of_a_saved_parameter() -> None:
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        weight: Any = nn.Parameter(torch.randn(3, 3))
        weight.main_grad = torch.zeros(3, 3)

        def product(x: torch.Tensor, weight: Any = weight) -> Any:
            return AddsItself.apply(x, weight)

        sample = torch.randn(2, 3, requires_grad=True)
        call = graph_callables([product], [(sample,)], device=CpuDevice()) if graphs else [product]
        for _ in range(3):
            x = torch.randn(2, 3, requires_grad=True)
            call[0](x).square().sum().backward()
            assert x.grad is not None
            found.append((x.grad, weight.main_grad.clone(), weight.grad))
    for (x_grad, main_grad, grad), (x_with, main_with, with_graphs) in zip(found[:3], found[3:], strict=True):
        assert torch.equal(x_grad, x_with) and torch.equal(main_grad, main_with)
        assert grad is None and with_graphs is None


def test_leaves_made_by_a_callable_are_no_parameters() -> None:
    """As for a gradient penalty, or an inner step of optimization."""
    module = nn.Linear(3, 1)
    reference = copy.deepcopy(module)

    def penalty(one: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
        return slope.square().sum()

    call = graphed(lambda x: penalty(module, x), batches(1))
    for x in batches(3):
        call[0](x).backward()
        penalty(reference, x).backward()
    assert same(gradients(module), gradients(reference))
    assert call.calls_without_graph == 0


def test_callable_that_returns_nothing_may_be_called_again() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> None:
            self.total.add_(x.sum(0))

    module = Counts()
    reference = copy.deepcopy(module)
    call = graphed(module, batches(1))
    for x in batches(3):
        assert module(x) is None
        reference(x)
    assert same([module.total], [reference.total])
    assert call.calls_without_graph == 0


class ReturnsOwnTensors(torch.autograd.Function):
    """Its gradients are its result and its input themselves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = x * weight
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> Any:
        x, result = ctx.saved_tensors
        return result, x


STRANGE_GRADIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "expanded": lambda x, weight: x * weight.sum(),
    "the tangent": lambda x, weight: x + weight,
    "the result and the input": lambda x, weight: ReturnsOwnTensors.apply(x, weight),
}


@pytest.mark.parametrize("name", sorted(STRANGE_GRADIENTS))
def test_gradients_without_own_memory_are_correct(name: str) -> None:
    function = STRANGE_GRADIENTS[name]
    weight = torch.randn(2, 3, requires_grad=True)
    other = weight.detach().clone().requires_grad_()
    call = graphed(lambda x: function(x, weight), batches(1, requires_grad=True), order=[1, 1, 1, -1, -1, -1])
    for _ in range(3):
        found = []
        xs = batches(3, requires_grad=True)
        ys = [x.detach().clone().requires_grad_() for x in xs]
        for each, given in ((call[0], xs), (lambda x: function(x, other), ys)):
            results = [each(one) for one in given]
            for result in results:
                result.square().sum().backward()
            found.append([*results, *(one.grad for one in given)])
        assert same(*found)
    assert same([weight.grad], [other.grad])


def test_buffer_writes_of_a_graph_increment_versions() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x * 2

    module = Counts()
    graphed(module, batches(1, requires_grad=True))
    loss = (torch.randn(3, requires_grad=True) * module.count).sum()
    module(batches(1, requires_grad=True)[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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


@pytest.mark.parametrize("order", [None, [1, -1, 1, -1], [1, 1, -1, -1]])
def test_second_backward_is_an_error_with_its_reason(order: list[int] | None) -> None:
    module = nn.Linear(3, 3)
    graphed(module, batches(1), order=order)
    losses = [module(torch.randn(2, 3)).square().sum() for _ in range(2 if order == [1, 1, -1, -1] else 1)]
    losses[0].backward(retain_graph=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the backward of callable 1 is called a second time.* in one backward"):
            torch.autograd.grad(losses[0], [module.weight], retain_graph=True)
    for loss in losses[1:]:
        loss.backward()


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(3, 3), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = lambda y: self.linear(y).relu()  # noqa: E731
        return torch.utils.checkpoint.checkpoint(part, x, use_reentrant=self.reentrant, preserve_rng_state=False)  # type: ignore[no-any-return]


def test_checkpoint_is_captured_where_its_backward_is_separate() -> None:
    module = Checkpointed(reentrant=False)
    reference = copy.deepcopy(module)
    call = graphed(module, batches(1, requires_grad=True))
    for x in batches(3, requires_grad=True):
        module(x).square().sum().backward()
        reference(x).square().sum().backward()
    assert same(gradients(module), gradients(reference))
    assert call.calls_without_graph == 0
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        graphed(Checkpointed(reentrant=True), batches(1, requires_grad=True))
