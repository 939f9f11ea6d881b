"""Pointer tables and memory that preludes read are not reused during a launch that reads them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, check, values

from optimizations.graph.device import DeviceTools
from optimizations.graph.plan import Choice
from optimizations.trees.containers import managers

WEIGHT = values(7)
STREAM = 12


def in_place(cuda: CudaOnCpu) -> tuple[Compiled, set[int]]:
    """Return a function with a prelude that ran on two streams, and the addresses of its tables."""
    compiled = Compiled(Model(cuda), choice=Choice.PRELUDE)
    check(compiled, WEIGHT, calls=20)
    assert compiled.reports[0].pointer_bytes, compiled.reports
    cuda.tools.read_on.clear()
    cuda.stream = STREAM
    check(compiled, WEIGHT, calls=2)
    (node,) = managers()[0].nodes()
    applied = node.session._applied
    memory = {tensor.data_ptr() for tensor in (*applied._prelude.memory, applied._table.memory)}
    assert len(memory) == 4, "the table, and what the prelude reads"
    return compiled, memory


def leave_pool() -> None:
    managers()[0].leave_pool()


def drop() -> None:
    (manager,) = managers()
    manager._drop(next(manager.nodes()))


@pytest.mark.parametrize("let_go", [leave_pool, drop])
def test_memory_of_the_last_launch_is_recorded_on_its_stream(
    cuda_on_cpu: CudaOnCpu, let_go: Callable[[], None]
) -> None:
    compiled, memory = in_place(cuda_on_cpu)
    let_go()
    assert set(cuda_on_cpu.tools.read_on) == {(address, STREAM) for address in memory}
    check(compiled, WEIGHT, calls=2)


def test_memory_of_a_freed_function_is_recorded_on_its_stream(cuda_on_cpu: CudaOnCpu) -> None:
    compiled, memory = in_place(cuda_on_cpu)
    del compiled
    gc.collect()
    assert set(cuda_on_cpu.tools.read_on) == {(address, STREAM) for address in memory}


def test_each_tensor_is_recorded_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []

    class Memory:
        def __init__(self, name: str) -> None:
            self.name = name

        def record_stream(self, stream: Any) -> None:
            told.append((self.name, stream))

    tools = DeviceTools.__new__(DeviceTools)
    tools.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    memory: Any = [Memory("table"), Memory("nodes")]
    tools.still_read(memory, None)
    other: Any = "other"
    tools.still_read(memory, other)
    assert told == [(name, stream) for stream in ("current", "other") for name in ("table", "nodes")]
