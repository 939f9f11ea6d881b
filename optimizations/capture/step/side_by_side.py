"""Let independent kernels of a recorded step run at the same time: see `optimizations.concurrency`.

A step runs code of any kind, in threads of autograd too. So its operators come from the observer, whose dispatch mode
is on in all of them, and kernels of Inductor from all modules that it generated. What else adds nodes, as copies of
inputs and results do, is a barrier.

Note [Nodes that are led elsewhere]. Copies of inputs and results, and nodes of inputs that are read where they lie, are
set in the executable graph. Another executable has them as they were captured, so they are set again in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from optimizations.capture.device import Device
from optimizations.concurrency.branches import Branches, Noted
from optimizations.concurrency.launch_log import LaunchLog
from optimizations.concurrency.noted_capture import HAS_COLLECTIVES, SWITCHED_OFF
from optimizations.in_place.generated import COLLECTIVE_OPERATORS
from optimizations.one_line import one_line
from optimizations.report.concurrency import ConcurrencyReport


class LedGraph:
    """Implement `branches.Graph` for a graph whose nodes are led elsewhere. Note [Nodes that are led elsewhere].

    Args:
        renew: set these nodes in the executable that the graph has now.
    """

    def __init__(self, graph: Any, renew: Iterable[Callable[[], None]]) -> None:
        self._graph = graph
        self._renew = tuple(renew)

    def raw_cuda_graph(self) -> Any:
        return self._graph.raw_cuda_graph()

    def instantiate(self) -> None:
        self._graph.instantiate()
        for renew in self._renew:
            renew()


@dataclass(slots=True)
class SideBySide:
    """Hold the race of one recording.

    Attributes:
        branches: None where there is none, for the reason `chain`.
    """

    branches: Branches | None = None
    chain: str = SWITCHED_OFF

    def report(self) -> ConcurrencyReport:
        """Return the report of the recording."""
        return self.branches.report() if self.branches is not None else ConcurrencyReport("chain", self.chain)


def side_by_side(
    device: Device, graph: Any, pool: Any, log: LaunchLog | None, renew: Iterable[Callable[[], None]]
) -> SideBySide:
    """Begin the race of a captured graph, where there is something to win. Whatever fails leaves the chain."""
    if log is None:
        return SideBySide()
    if log.failure is not None:
        return SideBySide(chain=log.failure)
    if any(one.launch.name.partition(".")[0] in COLLECTIVE_OPERATORS for one in log.logged):
        return SideBySide(chain=HAS_COLLECTIVES)
    branches = None
    try:
        workspaces = device.workspace_ranges()
        used = [(one.address, one.address + one.size_bytes) for one in (*device.used_ranges(pool), *workspaces)]
        memory = [(one.address, one.address + one.size_bytes) for one in (*device.pool_ranges(pool), *workspaces)]
        branches = device.branches(LedGraph(graph, renew), Noted(log.logged, never_freed=used))
        branches.prepare(device.read(graph), memory)
    except Exception as error:
        if branches is None:
            return SideBySide(chain=one_line(error))
        branches.stop(one_line(error))
    return SideBySide(branches)
