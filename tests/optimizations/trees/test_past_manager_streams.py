"""Calls of functions without a graph follow the streams of the graphs whose results they may read."""

from __future__ import annotations

import threading

import pytest
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, values

W = values(7)


def graphed(cuda: CudaOnCpu) -> Compiled:
    compiled = Compiled(Model(cuda))
    for step in range(4):
        compiled(values(step), values(2), W)
    cuda.waits.clear()
    return compiled


def without_graph(cuda: CudaOnCpu) -> Compiled:
    """A function that gets no graph before its first call."""
    compiled = Compiled(Model(cuda))
    compiled.function._measured[()] = "no graph", "it is small"
    return compiled


@pytest.mark.parametrize("called_before", [False, True])
def test_call_past_manager_waits_for_graphs(cuda_on_cpu: CudaOnCpu, called_before: bool) -> None:
    small = without_graph(cuda_on_cpu)
    compiled = graphed(cuda_on_cpu)
    if called_before:
        small(values(1), values(2), W)
    for stream, waits in ((1, []), (2, [1]), (2, [1])):
        cuda_on_cpu.stream = stream
        small(values(1), values(2), W)
        assert cuda_on_cpu.waits == waits
    cuda_on_cpu.stream = 1
    compiled(values(3), values(2), W)
    assert cuda_on_cpu.waits == [1, 2], "the graph writes over what the function read"


def test_other_threads_streams_stay_independent(cuda_on_cpu: CudaOnCpu) -> None:
    """A thread that never called the manager's functions does not wait for their streams."""
    small = without_graph(cuda_on_cpu)
    graphed(cuda_on_cpu)
    cuda_on_cpu.stream = 5
    thread = threading.Thread(target=lambda: small(values(1), values(2), W))
    thread.start()
    thread.join()
    assert cuda_on_cpu.waits == []
