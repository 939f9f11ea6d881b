"""With share_io=True a callable reads the results of the previous one in place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from callable_parts import gradients, same
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations.capture.callables.graph_callables import GraphedCallables


def layers(count: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)]


def graphed(modules: Sequence[Any], **options: Any) -> Any:
    x = torch.randn(2, 4)
    samples = [(x,), *((x.clone().requires_grad_(),) for _ in modules[1:])]
    return GraphedCallables(list(modules), samples, share_io=True, device=CpuDevice(), **options)


def forward(modules: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
    for module in modules:
        x = module(x)
    return x


@pytest.mark.parametrize("order", [None, [1, 1, 2, 2, 3, 3, -3, -3, -2, -2, -1, -1]])
def test_chain_equals_eager_and_copies_one_input(order: list[int] | None) -> None:
    modules = layers()
    reference = copy.deepcopy(modules)
    group = graphed(modules, order=order)
    for _ in range(3):
        batches = [torch.randn(2, 4) for _ in range(1 if order is None else 2)]
        for some in (modules, reference):
            losses = [forward(some, x).square().sum() for x in batches]
            for loss in losses:
                loss.backward()
            del losses, loss
        assert same(gradients(*modules), gradients(*reference))
    assert group.calls_without_graph == 0
    copied = {one.callable: one.copied_tensors for one in group.report() if one.direction == "forward"}
    assert copied == {1: 1, 2: 0, 3: 0}


def test_callables_of_a_chain_have_equally_many_pairs() -> None:
    """The second callable has one forward at a time, and reads the results of either pair of the first."""
    group = graphed(layers(2), order=[1, 1, 2, -2, -1, 2, -2, -1])
    places = [(one.callable, one.index) for one in group.report() if one.direction == "forward"]
    assert places == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_unshared_argument_runs_uncaptured() -> None:
    modules = layers(2)
    reference = copy.deepcopy(modules)
    group = graphed(modules)
    hidden = modules[0](torch.randn(2, 4))
    other = torch.randn(2, 4, requires_grad=True)
    with pytest.warns(UserWarning, match="have to be the results of the callable before"):
        found = modules[1](other)
    assert torch.equal(found, reference[1](other))
    assert group.calls_without_graph == 1
    assert torch.equal(modules[1](hidden), reference[1](hidden.detach()))


@pytest.mark.filterwarnings("ignore:callable . runs without its graphs")
def test_shared_result_is_valid_until_the_next_backward() -> None:
    """The first backward has run already, and only the second one's graph reads the result."""
    modules = layers(2)
    reference = copy.deepcopy(modules)
    graphed(modules)
    found = []
    for first, second in (modules, reference):
        torch.manual_seed(1)
        hidden = first(torch.randn(2, 4))
        loss = second(hidden).square().sum()
        early = torch.autograd.grad(hidden.sum(), list(first.parameters()), retain_graph=True)
        del hidden
        first(torch.randn(2, 4)).sum().backward()
        found.append([*early, *torch.autograd.grad(loss, list(second.parameters()))])
    assert same(*found)


def test_write_into_a_shared_result_is_an_error_of_the_backward() -> None:
    """The second callable's backward reads the result; the first one's does not."""
    double, square = (lambda x: x * 2), torch.square
    sample = torch.randn(3, requires_grad=True)
    group = GraphedCallables([double, square], [(sample,), (sample,)], share_io=True, device=CpuDevice())
    hidden = group[0](sample)
    loss = group[1](hidden).sum()
    with torch.no_grad():
        hidden.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_referenced_result_of_the_chain_stays_valid() -> None:
    modules = layers(2)
    reference = copy.deepcopy(modules)
    graphed(modules)
    kept, expected = [], []
    for _ in range(3):
        x = torch.randn(2, 4)
        hidden = modules[0](x)
        modules[1](hidden).sum().backward()
        kept.append(hidden)
        expected.append(reference[0](x))
    assert same([one.detach() for one in kept], [one.detach() for one in expected])


def test_result_that_is_passed_twice_is_copied_once() -> None:
    """Code may check whether two arguments are the same tensor."""
    sample = torch.randn(3, requires_grad=True)
    functions = [torch.exp, lambda x, y: x * 2 if x is y else x * y]
    group = GraphedCallables(functions, [(sample,), (sample, sample)], share_io=True, device=CpuDevice())
    hidden = group[0](sample)
    assert torch.equal(group[1](hidden, hidden), hidden * 2)
    assert group.calls_without_graph == 0
