"""Weights whose data is replaced in place, in whole programs: new addresses and metadata."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_gpu.allocator import aligned
from simulated_gpu.compiler import Capturable, CompiledOnCpu
from simulated_gpu.driver import Function, Node, word
from torch import nn

import optimizations
from tests.optimizations.trees.test_parameters import Net


class Shifted(nn.Module):
    """Its weight lies as weights do in a vector of several: where no kernel wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(aligned(16, offset=16).copy_(torch.arange(16.0)).view(4, 4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) * self.shift.sum()


def called(net: Shifted, step: int, size: int) -> torch.Tensor:
    """The data that the buffer has now, at an address of its own."""
    data = aligned(size).copy_(torch.arange(size) + step)
    net.shift.set_(data)
    return data


@pytest.mark.usefixtures("weights_let_go")
def test_weight_next_to_an_unmoved_one_is_copied(compiled_on_cpu: CompiledOnCpu) -> None:
    net, kept = Shifted(), []
    run = torch.compile(net, backend="encore")
    with torch.no_grad():
        for step in range(24):
            kept.append(called(net, step, 4))
            x = torch.full((3, 4), 0.01 * step)
            torch.testing.assert_close(run(x), net(x))
    assert sum(compiled_on_cpu.captures) < 8


def test_weight_of_another_size_is_not_copied(compiled_on_cpu: CompiledOnCpu) -> None:
    """Dynamo does not notice it, but the generated code does when it is run."""
    net, kept = Shifted(), []
    run = torch.compile(net, backend="encore")
    with torch.no_grad():
        for step in range(16):
            kept.append(called(net, step, 4))
            run(torch.ones(3, 4))
        assert compiled_on_cpu.cuda.replays
        for step in range(3):
            kept.append(called(net, step, 3))
            with pytest.raises(AssertionError, match="expected size 3==4"):
                run(torch.ones(3, 4))


@pytest.mark.usefixtures("weights_let_go")
def test_weight_whose_address_is_hidden_is_copied(
    compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel holds the address in an unknown form. Detecting this takes eight captures, once."""
    hiding = Function("hiding", (8,), lambda hidden: None)
    compiled_on_cpu.cuda.driver.add_function(hiding)
    captured = Capturable.__call__

    def hides_an_address(function: Capturable, inputs: list[Any]) -> Any:
        cuda = compiled_on_cpu.cuda
        if cuda.capturing is not None:
            weight = next(one for one in inputs if one.shape == (4, 4))
            cuda.driver.add_node(cuda.capturing.graph, Node("KERNEL", hiding, [word(3 * weight.data_ptr())]))
        return captured(function, inputs)

    monkeypatch.setattr(Capturable, "__call__", hides_an_address)
    net, kept = Net(), []
    run = torch.compile(net, backend="encore")
    with torch.no_grad():
        for step in range(40):
            kept.append(net.first.data)
            net.first.data = aligned(16).view(4, 4).fill_(0.01 * step)
            for x in torch.full((2, 3, 4), 0.1 * step):
                torch.testing.assert_close(run(x), net(x))
    (report,) = optimizations.report()
    assert len(report.recordings) == 3
    assert not any(one.indirect for one in report.recordings[-1].inputs if one.data_bytes == 64)
    assert sum(compiled_on_cpu.captures) <= 3 * (1 + 8)


class Two(nn.Module):
    """Each weight is used by an operator that the generated code calls, so that only a trial can tell how."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(aligned(16).view(4, 4).fill_(1.0)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.first).clone() @ self.second


@pytest.mark.usefixtures("weights_let_go")
@pytest.mark.parametrize("then", [("second",), ("first", "second")])
def test_weight_that_moves_after_another_is_copied_at_once(
    compiled_on_cpu: CompiledOnCpu, then: tuple[str, ...]
) -> None:
    net, kept = Two(), []
    run = torch.compile(net, backend="encore")
    with torch.no_grad():
        for step in range(40):
            for name in ("first",) if step < 12 else then:
                weight = net.get_parameter(name)
                kept.append(weight.data)
                weight.data = aligned(16).view(4, 4).fill_(0.01 * step)
            for x in torch.full((2, 3, 4), 0.1 * step):
                torch.testing.assert_close(run(x), net(x))
            if step == 11:
                (report,) = optimizations.report()
                assert [len(one.inputs) for one in report.recordings] == [1, 1, 2]
    (report,) = optimizations.report()
    assert [len(one.inputs) for one in report.recordings] == [1, 1, 2, 3]
