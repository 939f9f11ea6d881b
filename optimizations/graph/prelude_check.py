"""Check once on each device that a prelude updates a node of a graph, before any graph of a program relies on it.

A prelude that fails tells so in a status word, which no call waits for. So a small graph shows that it works: a kernel
that writes a number to one address is updated to write it to another one.
"""

from __future__ import annotations

from typing import Any

import torch

from optimizations.graph.applied import AppliedPlan
from optimizations.graph.driver import check
from optimizations.graph.editing import EditableGraph, LaunchParameters, pointer, unsigned
from optimizations.graph.plan import Available, Choice, make_plan
from optimizations.graph.pointers import Analysis, InputVerdict, PointerUse
from optimizations.graph.protocol import UpdaterTools
from optimizations.graph.read import read_graph
from optimizations.graph.records import WORD_BYTES, CapturedGraph
from optimizations.graph.table import CAPACITIES

NUMBER = 0x5EED


def failed_prelude(driver: Any, tools: UpdaterTools, stream: Any) -> str | None:
    """Return what goes wrong when a prelude updates a node; None where it works. Waits for `stream` (`CUstream`).

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
        empty.add_kernel(tools.table_function(CAPACITIES[0]), 1, 1, arguments)
        captured = read_graph(driver, raw)
        found = Analysis((InputVerdict(0, (PointerUse((0,), 0, 0, 0, 0),), ()),), ())
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
