"""Determine the node updaters of a device: a prelude only if it successfully updated a node of a test graph.

A prelude reports failure in a status word, for which no call waits. So a small graph tests it: a kernel that writes a
number to one address is updated to write it to another address.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Collection
from typing import Any

import torch

from optimizations.graph.applied import AppliedPlan
from optimizations.graph.device import DeviceTools, cubin, target_of
from optimizations.graph.driver import check
from optimizations.graph.editing import EditableGraph, LaunchParameters, pointer, unsigned
from optimizations.graph.plan import Available, Choice, make_plan
from optimizations.graph.pointers import Analysis, InputVerdict, PointerUse
from optimizations.graph.prelude import build_prelude
from optimizations.graph.read import read_graph
from optimizations.graph.records import WORD_BYTES, CapturedGraph, KernelNode
from optimizations.graph.table import CAPACITIES, KERNEL_NAME, build_table_kernel
from optimizations.stack_trace import one_line

NUMBER = 0x5EED

_DEVICES: dict[int, DeviceTools] = {}


def device_tools(index: int) -> DeviceTools:
    """Return the tools of CUDA device `index`, the same object until `unload_kernels`.

    Raises:
        ImportError: `cuda.bindings` is missing; it comes with torch's CUDA wheels.
    """
    from cuda.bindings import driver

    if index not in _DEVICES:
        _DEVICES[index] = DeviceTools(driver, torch.device("cuda", index), against_prelude)
    return _DEVICES[index]


@functools.cache
def build_early() -> None:
    """Build Encore's kernels for the current GPU in a thread, once a process. A failure shows when one is used."""
    target = target_of(torch.cuda.current_device())

    def build() -> None:
        with contextlib.suppress(RuntimeError):
            for capacity in CAPACITIES:
                cubin(build_table_kernel, target, capacity)
            cubin(build_prelude, target)

    with contextlib.suppress(RuntimeError):  # as when the interpreter is ending
        threading.Thread(target=build, name="encore-kernels").start()


def unload_kernels() -> None:
    """Unload Encore's kernels on all devices. No graph may use them any more."""
    while _DEVICES:
        _, tools = _DEVICES.popitem()
        tools.unload()


def available(tools: DeviceTools, graph: CapturedGraph, kernels: Collection[str]) -> Available:
    """Return the updaters for the nodes of `graph`; `kernels` are the driver's names of its Triton kernels."""
    nodes = (index for index, node in enumerate(graph.nodes) if isinstance(node, KernelNode) and node.name in kernels)
    return Available(frozenset(nodes), lambda: tools.against_prelude)


def against_prelude(tools: DeviceTools) -> str | None:
    """Return why graphs can have no prelude on a GPU; None if its kernels were built and the test graph worked."""
    try:
        for capacity in CAPACITIES:
            tools.function(build_table_kernel, KERNEL_NAME, capacity)
        with torch.cuda.stream(torch.cuda.Stream(tools.device)):
            return failed_prelude(tools.driver, tools, tools.stream())
    except RuntimeError as error:
        return one_line(error)


def failed_prelude(driver: Any, tools: DeviceTools, stream: Any) -> str | None:
    """Return the failure of a prelude that updates a node; None if it works. Waits for `stream` (`CUstream`).

    Raises:
        CudaCallFailed: a graph with a prelude cannot be made.
    """
    recorded, moved = (torch.zeros(1, dtype=torch.int64, device=tools.device) for _ in range(2))
    raw = check(driver.cuGraphCreate, 0)
    executable = None
    try:
        context = check(driver.cuCtxGetCurrent)
        words = NUMBER.to_bytes(WORD_BYTES, "little").ljust(CAPACITIES[0] * WORD_BYTES, b"\0")
        arguments = LaunchParameters([pointer(recorded.data_ptr()), unsigned(1), words])
        empty = EditableGraph(driver, raw, (), CapturedGraph(nodes=(), edges=()), context)
        empty.add_kernel(tools.function(build_table_kernel, KERNEL_NAME, CAPACITIES[0]), 1, 1, arguments)
        captured = read_graph(driver, raw)
        found = Analysis((InputVerdict(0, (PointerUse(0, 0, 0, 0, 0),), ()),), ())
        plan = make_plan(captured, found, Choice.PRELUDE, Available())
        applied = AppliedPlan(EditableGraph.of(driver, raw, captured), plan, tools)
        executable = check(driver.cuGraphInstantiate, raw, 0)
        applied.instantiated(executable, stream)
        applied.point({0: moved.data_ptr()})
        check(driver.cuGraphLaunch, executable, stream)
        check(driver.cuStreamSynchronize, stream)
        if applied.failure() is None and (recorded.item(), moved.item()) == (0, NUMBER):
            return None
        return applied.failure() or "a graph with a prelude did not read the new address"
    finally:
        if executable is not None:
            check(driver.cuGraphExecDestroy, executable)
        check(driver.cuGraphDestroy, raw)
