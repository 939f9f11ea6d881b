"""Inputs that a function writes and that are no parameters: caches and buffers that the program passes.

Stock runs such functions without a graph. Note [Inputs that are written] in `trees.graphed_function`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from simulated_gpu.allocator import aligned
from simulated_gpu.compiler import CompiledOnCpu
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import COUNT, KNOWN, Compiled, Model, nodes, values
from torch import nn

import optimizations
from optimizations.in_place.generated import GeneratedCode
from optimizations.trees.moved_inputs import MOST_MISFITS, MOST_RECORDINGS
from optimizations.trees.reasons import INPUT_KEEPS_MOVING, WRITES_INPUT

W = values(7)
UNKNOWN = GeneratedCode(None)


def writing(cuda: CudaOnCpu, code: GeneratedCode = KNOWN, **keywords: Any) -> tuple[Model, Compiled]:
    model = Model(cuda, writes_x=True, code=code)
    return model, Compiled(model, **{"mutated_input_idxs": (0,), **keywords})


def check(compiled: Compiled, buffers: Sequence[torch.Tensor], calls: int, first: int = 0) -> None:
    """Call with these buffers alternately, and with new other inputs."""
    kept = []
    for step in range(first, first + calls):
        x, y = buffers[step % len(buffers)], values(2 * step)
        kept.append(y)
        before = x.clone()
        compiled.checked(x, y, W)
        assert torch.equal(x, before + 1), step


def test_fixed_buffer_is_written_in_place(cuda_on_cpu: CudaOnCpu) -> None:
    model, compiled = writing(cuda_on_cpu, UNKNOWN)
    check(compiled, [values(1)], calls=20)
    (node,) = nodes()
    assert node.replays == 18
    assert node.copied_per_replay == 4 * COUNT, "what else moves is copied: it could only be tried out"
    assert compiled.uncaptured() == {}
    assert model.runs.count("plain") < 5
    (report,) = compiled.reports
    assert report.steady_replays > 10


@pytest.mark.parametrize("count", [2, 3])
def test_alternating_buffers_are_written_in_place(cuda_on_cpu: CudaOnCpu, count: int) -> None:
    _, compiled = writing(cuda_on_cpu)
    buffers = [values(10 * number) for number in range(count)]
    check(compiled, buffers, calls=10 * count)
    assert len(compiled.reports) <= MOST_RECORDINGS
    before = sum(report.replays for report in compiled.reports)
    check(compiled, buffers, calls=4 * count)
    assert sum(report.replays for report in compiled.reports) >= before + 4 * count - MOST_RECORDINGS


def test_new_buffers_stop_being_recorded(cuda_on_cpu: CudaOnCpu) -> None:
    _, compiled = writing(cuda_on_cpu, UNKNOWN)
    calls = 3 * MOST_RECORDINGS + MOST_MISFITS + 10
    buffers = [values(number) for number in range(calls)]
    check(compiled, buffers, calls=calls)
    assert len(compiled.reports) == MOST_RECORDINGS
    assert compiled.uncaptured()[INPUT_KEEPS_MOVING] > MOST_MISFITS
    assert compiled.functions[0].without_graph == INPUT_KEEPS_MOVING
    assert not nodes(), "stock has no memory for its graphs either"


@pytest.mark.parametrize("which", ["backward", "several partitions", "not by Inductor", "unaligned"])
def test_unsupported_functions_are_left_to_stock(cuda_on_cpu: CudaOnCpu, which: str) -> None:
    settings: dict[str, Any] = {"is_backward": which == "backward", "is_inference": which != "backward"}
    if which == "several partitions":
        settings.update(code=dataclasses.replace(KNOWN, is_partition=True))
    if which == "not by Inductor":
        settings.update(code=dataclasses.replace(KNOWN, written=frozenset({0})), mutated_input_idxs=())
    model, compiled = writing(cuda_on_cpu, **settings)
    check(compiled, [values(1, offset=int(which == "unaligned"))], calls=8)
    assert set(compiled.uncaptured()) == {WRITES_INPUT}
    assert set(model.runs) == {"plain"}


def test_result_passed_as_written_buffer_is_correct(cuda_on_cpu: CudaOnCpu) -> None:
    """It is in the graph's memory, or in a copy of the caller's."""
    _, compiled = writing(cuda_on_cpu)
    x = values(1)
    for step in range(40):
        before = x.clone()
        (out,) = compiled.checked(x, values(step), W)
        assert torch.equal(x, before + 1), step
        x = out if step % 3 else out.clone()
        x.remainder_(100)


def test_iteration_starts_with_bounded_recordings(cuda_on_cpu: CudaOnCpu) -> None:
    """One function for all layers, each with a cache of its own, and results that are gone before the next call."""
    _, compiled = writing(cuda_on_cpu)
    caches = [values(number) for number in range(24)]
    for step in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        before = sum(report.replays for report in compiled.reports)
        for cache in caches:
            was, y = cache.clone(), values(step)
            (out,) = compiled.function([cache, y, W])
            assert torch.equal(cache, was + 1)
            del out
    assert all(function.without_graph is None for function in compiled.functions)
    assert sum(report.replays for report in compiled.reports) == before + MOST_RECORDINGS


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


def drawn(seed: int) -> torch.Tensor:
    return aligned(64).copy_(torch.randn(64, generator=torch.Generator().manual_seed(seed)))


def test_view_of_written_memory_is_copied_as_by_stock(compiled_on_cpu: CompiledOnCpu) -> None:
    net, twin = Averaging(), Averaging()
    run = torch.compile(net, backend="encore")
    with torch.no_grad():
        for step in range(24):
            x = drawn(step)
            torch.testing.assert_close(run(x), twin(x))
        assert any(one.indirect for report in optimizations.recordings() for one in report.inputs)
        for _ in range(4):
            torch.testing.assert_close(run(net.mean.view(64)), twin(twin.mean.clone()))
            torch.testing.assert_close(net.mean, twin.mean)
