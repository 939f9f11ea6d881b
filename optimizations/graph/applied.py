"""Carry a plan out on a captured graph, with all its node updaters behind one interface.

`AppliedPlan(graph, plan, tools)` changes the graph; the graph's owner then instantiates it; `instantiated` prepares
what needs the executable; from then on replay calls only `point` and `settle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from optimizations.graph.driver import check
from optimizations.graph.editing import EditableGraph
from optimizations.graph.host import HostUpdates
from optimizations.graph.plan import Plan
from optimizations.graph.protocol import Applier, ApplierTools
from optimizations.graph.table import PointerTable
from optimizations.options import Choice

APPLIERS: Mapping[Choice, Applier] = {
    choice: import_module(f"optimizations.graph.{choice}").APPLIER
    for choice in Choice
    if choice not in (Choice.OFF, Choice.AUTO)
}


class AppliedPlan:
    """Hold a plan on one graph. It is an `in_place.addresses.Pointers` once `instantiated` was called."""

    def __init__(self, target: EditableGraph, plan: Plan, tools: ApplierTools) -> None:
        self._target = target
        self._tools = tools
        self._executable: Any = None
        self._table: PointerTable | None = None
        if plan.slots:
            self._table = PointerTable(target, plan.slots, tools.table_function, tools.device, tools.replace_address)
        address = self._table.address if self._table is not None else 0
        planned = {choice: plan.of(choice) for choice in APPLIERS}
        self._attached = [
            APPLIERS[choice].attach(target, nodes, address, tools) for choice, nodes in planned.items() if nodes
        ]
        writes_table = self._table.nodes if self._table is not None else ()
        self._updates = [*(update for one in self._attached for update in one.updates), *writes_table]
        first = [*(node.handle for node in writes_table), *(handle for one in self._attached for handle in one.first)]
        if first:
            target.begin_with(first)
        self._memory = [*(tensor for one in self._attached for tensor in one.memory)]
        if self._table is not None:
            self._memory.append(self._table.memory)

    def instantiated(self, executable: Any, stream: Any) -> None:
        """Take over the executable graph (`CUgraphExec`); upload it on `stream` if nodes of it are device-updatable."""
        self._executable = executable
        self._host = HostUpdates(self._updates, executable)
        if any(one.device_updatable for one in self._attached):
            check(self._target.driver.cuGraphUpload, executable, stream)

    def point(self, addresses: Mapping[int, int]) -> int:
        """Make the next launch read these inputs at these addresses. See `in_place.addresses.Pointers`.

        Raises:
            AddressRefused: an address cannot be put into a tensor map.
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

        Call this before the plan is dropped while launches may be under way.
        """
        if self._memory:
            self._tools.still_read(self._memory, stream)

    def failure(self) -> str | None:
        """Return what went wrong on the device in an earlier launch; None where nothing did.

        Waits for the device where an updater works there.
        """
        found = (one.failure() for one in self._attached if one.failure is not None)
        return next((failure for failure in found if failure is not None), None)
