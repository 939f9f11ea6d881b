"""What a graph writes at fixed addresses, next to what it reads in place: views of it, and its version counters."""

from __future__ import annotations

import torch
from simulated_gpu.compiler import CompiledOnCpu
from simulated_gpu.work import aligned
from torch import nn

import optimizations

CALLS = 24
"""Enough for a recording, trial calls, and replays that read their inputs in place."""


class Averaging(nn.Module):
    mean: torch.Tensor
    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", aligned(64))
        self.register_buffer("places", torch.arange(0, 64, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean[self.places] = x.tanh().sum() * 0.1
        return x * self.mean.sum()  # reads `x` after that


def _values(seed: int) -> torch.Tensor:
    return aligned(64).copy_(torch.randn(64, generator=torch.Generator().manual_seed(seed)))


def test_view_of_written_memory_is_copied_as_by_stock(compiled_on_cpu: CompiledOnCpu) -> None:
    net, twin = Averaging(), Averaging()
    run = torch.compile(net, backend="encore")
    with torch.no_grad():
        for step in range(CALLS):
            x = _values(step)
            torch.testing.assert_close(run(x), twin(x))
        assert any(one.indirect for report in optimizations.recordings() for one in report.inputs)
        for _ in range(4):
            torch.testing.assert_close(run(net.mean.view(64)), twin(twin.mean.clone()))
            torch.testing.assert_close(net.mean, twin.mean)


def _writing(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + 1


def test_calls_that_stock_leaves_without_a_graph_are_reported(compiled_on_cpu: CompiledOnCpu) -> None:
    run = torch.compile(_writing, backend="encore")
    for step in range(5):
        run(aligned(64, offset=1).copy_(_values(step)))  # not aligned: a graph could not write it where it is
    ((uncaptured,),) = [report.uncaptured for report in optimizations.report()]
    assert uncaptured.reason == "it writes an input that is neither a parameter nor a result of another graph"
    assert uncaptured.calls == 5
