"""Carries a plan out on a captured graph: the three appliers behind one interface.

`AppliedPlan(graph, plan, tools)` changes the graph; it is then instantiated by whoever owns it; `instantiated` prepares
what needs the executable; from then on `point` and `settle` are all that replay calls.

Where is what: `host_apply` sets nodes from the host, `prelude_apply` adds the prelude kernel, `ptx_apply` exchanges
kernels; both of the latter read the `PointerTable`, whose nodes are set from the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from optimizations.appliers.host import HostUpdates, NodeUpdate, host_update
from optimizations.appliers.prelude import AttachedPrelude
from optimizations.appliers.ptx import substitute
from optimizations.appliers.table import PointerTable
from optimizations.captured.driver import check
from optimizations.captured.editing import EditableGraph
from optimizations.captured.graph import KernelNode
from optimizations.indirection.plan import Plan, PtxNode
from optimizations.indirection.tensor_map import ReplaceAddress


class ApplierTools(Protocol):
    """What the appliers need of a device; `tools.DeviceTools` has it."""

    device: torch.device
    replace_address: ReplaceAddress | None

    def is_current(self) -> bool:
        """Whether the device is the current one."""

    def on_device(self) -> AbstractContextManager[Any]:
        """Makes the device current."""

    def table_function(self, capacity: int) -> Any:
        """The kernel that writes up to `capacity` words of a pointer table, loaded."""

    def prelude_function(self) -> Any:
        """The prelude kernel, loaded."""

    def rewritten_function(self, node: PtxNode, record: KernelNode) -> Any:
        """The kernel of this node with the parameters of the plan dereferenced, loaded."""


class AppliedPlan:
    """A plan on one graph. `following.Pointers` once `instantiated` was called."""

    def __init__(self, target: EditableGraph, plan: Plan, tools: ApplierTools) -> None:
        self._target = target
        self._tools = tools
        self._executable: Any = None
        self._prelude: AttachedPrelude | None = None
        self._table: PointerTable | None = None
        self._updates: list[NodeUpdate] = [host_update(target, node, tools.replace_address) for node in plan.host_nodes]
        if plan.slots:
            self._table = PointerTable(target, plan.slots, tools.table_function, tools.device, tools.replace_address)
            self._updates += self._table.nodes
            beginning = [node.handle for node in self._table.nodes]
            for node in plan.ptx_nodes:
                substitute(target, node, tools.rewritten_function(node, target.kernel(node.node)), self._table.address)
            if plan.prelude_nodes:
                self._prelude = AttachedPrelude(
                    target, plan.prelude_nodes, tools.prelude_function(), self._table.address, tools.device
                )
                beginning.append(self._prelude.handle)
            target.begin_with(beginning)

    def instantiated(self, executable: Any, stream: Any) -> None:
        """Take over the executable graph (`CUgraphExec`); upload it on `stream` if nodes of it are device-updatable."""
        self._executable = executable
        self._host = HostUpdates(self._updates, executable)
        if self._prelude is not None:
            check(self._target.driver.cuGraphUpload, executable, stream)

    def point(self, addresses: Mapping[int, int]) -> int:
        """See `following.Pointers`.

        Raises:
            AddressRefused: an address cannot be put into a tensor map.
        """
        if self._tools.is_current():  # making it current takes longer than a typical update
            return self._host.point(addresses)
        with self._tools.on_device():
            return self._host.point(addresses)

    def settle(self) -> None:
        """See `following.Pointers`."""
        if self._table is not None:
            with self._tools.on_device():
                for node in self._table.nodes:
                    node.rest(self._executable)

    def failure(self) -> str | None:
        """What went wrong on the device in an earlier launch; None where nothing did. Waits for the device."""
        code = self._prelude.error_code() if self._prelude is not None else 0
        return f"the prelude could not update a node (cudaError_t {code})" if code else None
