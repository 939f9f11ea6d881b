"""Parameters that a forward saves for its backward: each call's own, and nobody keeps them alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from simulated_gpu.compiler import CompiledOnCpu
from torch import nn

import optimizations
from optimizations.trees.containers import managers


class Net(nn.Module):
    """Saves its parameters as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))
        self.second = nn.Parameter(torch.linspace(0, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first.t()).sin() * self.second


class Halves(Net):
    """Saves a view of a parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first.chunk(2)[0].t()).tanh() @ self.first.chunk(2)[1]


def values(step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def gradients(call: object, net: Net, step: int) -> list[torch.Tensor]:
    x = values(step).requires_grad_()
    call(x).square().sum().backward()  # type: ignore[operator]
    found = [tensor.grad for tensor in (x, *net.parameters()) if tensor.grad is not None]
    net.zero_grad()
    return found


def over_the_same_memory(net: Net) -> list[nn.Parameter]:
    """Other parameters take the place of those that there are, which are returned."""
    before = [net.first, net.second]
    net.first, net.second = nn.Parameter(net.first.data), nn.Parameter(net.second.data)
    return before


def saved_in_place() -> list[bool]:
    (manager,) = managers()
    return [one.is_input for node in manager.nodes() for one in node.results.returned.found]


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("kind", [Net, Halves])
def test_fate_of_recorded_parameters_does_not_matter(
    compiled_on_cpu: CompiledOnCpu, kind: type[Net], lean: bool
) -> None:
    net = kind()
    call = torch.compile(net, backend="encore", options={"lean": lean})
    for step in range(8):
        gradients(call, net, step)
    captures = compiled_on_cpu.captures
    for parameter in over_the_same_memory(net):
        parameter.data = torch.full_like(parameter, 1e3)
    for step in range(8):
        torch.testing.assert_close(gradients(call, net, step), gradients(net, net, step))
    assert compiled_on_cpu.captures == captures
    assert all(saved_in_place()) is (kind is Net)
    steady = [one.steady_replays for report in optimizations.report() for one in report.recordings]
    assert any(steady) is lean


def test_parameter_written_before_the_backward_is_noticed(
    compiled_on_cpu: CompiledOnCpu,
) -> None:
    net = Net()
    call = torch.compile(net, backend="encore")
    for step in range(8):
        gradients(call, net, step)
    over_the_same_memory(net)
    for step in range(3):
        result = call(values(step).requires_grad_()).sum()
        with torch.no_grad():
            net.second.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()
    assert compiled_on_cpu.cuda.replays


def test_parameters_of_models_that_are_gone_are_not_kept(compiled_on_cpu: CompiledOnCpu) -> None:
    """One compiled function serves them all. The last call's history is kept until its recording is called again, or
    another is made, as under stock."""
    call = torch.compile(lambda net, x: net(x), backend="encore")
    parameters: list[weakref.ref[torch.Tensor]] = []
    for _ in range(4):
        net = Net()
        parameters += map(weakref.ref, net.parameters())
        for step in range(6):
            gradients(lambda x, net=net: call(net, x), net, step)
    del net
    gc.collect()
    assert compiled_on_cpu.cuda.replays
    assert [one() for one in parameters[:-2]] == [None] * (len(parameters) - 2)
