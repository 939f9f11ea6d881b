"""Bound parameters and shortcuts with CUDA graphs. Needs an NVIDIA GPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import optimizations
from optimizations.calls.bound import READS_BEFORE
from optimizations.calls.shortcut import Ordered

pytestmark = pytest.mark.gpu

ROUNDS = READS_BEFORE + 3


def close(results: Any, expected: Any) -> None:
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)


def called(run: Any, x: torch.Tensor) -> torch.Tensor:
    torch.compiler.cudagraph_mark_step_begin()
    return run(x).clone()


def test_exchanged_weights_are_released_without_memory_growth() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).eval().cuda()
    run = torch.compile(model, backend="encore", fullgraph=True)
    x = torch.randn(4, 1024, device="cuda")
    peaks = []
    with torch.no_grad():
        for _ in range(4):
            for _ in range(ROUNDS):
                called(run, x)
            storages = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
            model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()}, assign=True)
            close(called(run, x), model(x))
            gc.collect()
            assert [storage() for storage in storages] == [None] * len(storages)
            peaks.append(torch.cuda.memory_allocated())
    assert peaks[-1] <= peaks[1] + 4 * 1024 * 1024, peaks


class Deep(nn.Module):
    """A model with more parameters than are passed one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(20))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y)) + x
        return y, y.sum(0)


def steady_replays() -> int:
    return sum(one.steady_replays for one in optimizations.recordings())


def slow_calls() -> list[str]:
    return [way.reason for graph in optimizations.report() for way in graph.slow_calls]


def test_bound_arguments_skip_generated_code() -> None:
    model = Deep().eval().cuda().double()
    run = torch.compile(model, backend="encore", fullgraph=True)
    inputs = [torch.randn(4, 8, device="cuda", dtype=torch.double) for _ in range(5)]

    def check() -> None:
        for x in inputs:
            torch.compiler.cudagraph_mark_step_begin()
            close([one.clone() for one in run(x)], list(model(x)))

    with torch.no_grad():
        for _ in range(200):
            check()
            if optimizations.settled():
                break
        orders = [one for one in gc.get_objects() if type(one) is Ordered and one.order is not None and one.ready]
        passed = [len(one.order.arguments) for one in orders if one.order is not None]
        assert 41 in passed, "Inductor's code around the partition was understood"
        before = steady_replays()
        for _ in range(4):
            check()
        assert steady_replays() == before + 20, slow_calls()
        for layer in (0, 7):
            model.layers[layer].weight = nn.Parameter(model.layers[layer].weight.detach() * 0.5)
            for _ in range(ROUNDS):
                check()
            model.layers[layer + 1].weight.data = model.layers[layer + 1].weight.data * 1.5
            for _ in range(ROUNDS):
                check()
        model.load_state_dict({name: value * 0.75 for name, value in model.state_dict().items()}, assign=True)
        for _ in range(ROUNDS):
            check()
