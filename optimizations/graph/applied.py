"""Apply a plan to a captured graph through one interface for all node updaters.

`AppliedPlan(graph, plan, tools)` changes the graph; the graph's owner then instantiates it; `instantiated` prepares
what needs the executable; from then on replay calls only `point` and `settle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from optimizations.graph.device import DeviceTools
from optimizations.graph.driver import check
from optimizations.graph.editing import EditableGraph
from optimizations.graph.host import HostUpdates, NodeUpdate, node_update
from optimizations.graph.plan import Choice, Plan
from optimizations.graph.prelude import Prelude
from optimizations.graph.table import PointerTable


class AppliedPlan:
    """Hold a plan applied to one graph. It is an `in_place.addresses.Pointers` after `instantiated` was called."""

    def __init__(self, target: EditableGraph, plan: Plan, tools: DeviceTools) -> None:
        self._target = target
        self._tools = tools
        self._table: PointerTable | None = None
        self._prelude: Prelude | None = None
        self._updates: list[NodeUpdate] = [
            node_update(target, node, tools.replace_address) for node in plan.of(Choice.HOST)
        ]
        if plan.slots:
            self._table = PointerTable(target, plan.slots, tools)
            self._prelude = Prelude(target, plan.of(Choice.PRELUDE), self._table.address, tools)
            self._updates += self._table.nodes
            target.begin_with([*(node.handle for node in self._table.nodes), self._prelude.handle])

    def instantiated(self, executable: Any, stream: Any) -> None:
        """Take over the executable graph (`CUgraphExec`); upload it on `stream` if nodes of it are device-updatable."""
        self._executable = executable
        self._host = HostUpdates(self._updates, executable)
        if self._prelude is not None:
            check(self._target.driver.cuGraphUpload, executable, stream)

    def point(self, addresses: Mapping[int, int]) -> int:
        """Make the next launch read these inputs at these addresses. See `in_place.addresses.Pointers`.

        Raises:
            AddressRefused: an address cannot be inserted into a tensor map.
        """
        if self._tools.is_current():  # making it current takes longer than a typical update
            return self._host.point(addresses)
        with self._tools.on_device():
            return self._host.point(addresses)

    def settle(self) -> None:
        """Make the next launches read all inputs where the last one did. See `in_place.addresses.Pointers`."""
        if self._table is not None:
            with self._tools.on_device():
                for node in self._table.nodes:
                    node.rest(self._executable)

    def still_read(self, stream: torch.cuda.Stream | None = None) -> None:
        """Keep the memory that launches read until the work of a stream, by default the current one, is done.

        Call this before the plan is released while launches may be running.
        """
        if self._table is not None and self._prelude is not None:
            self._tools.still_read([*self._prelude.memory, self._table.memory], stream)

    def failure(self) -> str | None:
        """Return the failure of an earlier launch on the device; None if there was none.

        Waits for the device if the graph has a prelude.
        """
        return self._prelude.failure() if self._prelude is not None else None
