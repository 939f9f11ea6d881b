"""Carries a plan out on a captured graph: the three appliers behind one interface.

`AppliedPlan(graph, plan, tools)` changes the graph; it is then instantiated by whoever owns it; `instantiated` prepares
what needs the executable; from then on `point` is all that replay calls.

Where is what: `host_apply` sets nodes from the host, `prelude_apply` adds the prelude kernel, `ptx_apply` exchanges
kernels; both of the latter read the `PointerTable`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from optimizations.indirection.editing import EditableGraph
from optimizations.indirection.host_apply import HostApplier
from optimizations.indirection.plan import Plan, PtxNode
from optimizations.indirection.prelude_apply import AttachedPrelude
from optimizations.indirection.ptx_apply import substitute
from optimizations.indirection.table import PointerTable, Write
from optimizations.indirection.tensor_map import ReplaceAddress
from optimizations.replay.captured import WORD_BYTES, KernelNode
from optimizations.replay.driver import check


class ApplierTools(Protocol):
    """What the appliers need of a device; `tools.DeviceTools` has it."""

    device: torch.device
    replace_address: ReplaceAddress | None

    def on_device(self) -> AbstractContextManager[Any]:
        """Makes the device current."""

    def table_write(self) -> Write:
        """A writer of one pointer table."""

    def prelude_function(self) -> Any:
        """The prelude kernel, loaded."""

    def rewritten_function(self, node: PtxNode, record: KernelNode) -> Any:
        """The kernel of this node with the parameters of the plan dereferenced, loaded."""


class AppliedPlan:
    """A plan on one graph. `following.Pointers` once `instantiated` was called."""

    def __init__(self, target: EditableGraph, plan: Plan, tools: ApplierTools) -> None:
        self._target = target
        self._plan = plan
        self._tools = tools
        self._host: HostApplier | None = None
        self._prelude: AttachedPrelude | None = None
        self._table: PointerTable | None = None
        if plan.slots:
            memory = torch.zeros(plan.table_bytes // WORD_BYTES, dtype=torch.int64, device=tools.device)
            self._table = PointerTable(plan.slots, memory, tools.table_write(), tools.replace_address)
            for node in plan.ptx_nodes:
                substitute(target, node, tools.rewritten_function(node, target.kernel(node.node)), self._table.address)
            if plan.prelude_nodes:
                self._prelude = AttachedPrelude(
                    target, plan.prelude_nodes, tools.prelude_function(), self._table.address, tools.device
                )

    def instantiated(self, executable: Any, stream: Any) -> None:
        """Take over the executable graph (`CUgraphExec`); upload it on `stream` if nodes of it are device-updatable."""
        if self._plan.host_nodes:
            self._host = HostApplier(self._target, self._plan.host_nodes, executable, self._tools.replace_address)
        if self._prelude is not None:
            check(self._target.driver.cuGraphUpload, executable, stream)

    def point(self, addresses: Mapping[int, int]) -> int:
        """See `following.Pointers`."""
        written = 0
        with self._tools.on_device():
            if self._table is not None:
                written += self._table.point(addresses)
            if self._host is not None:
                written += self._host.point(addresses)
        return written

    def failure(self) -> str | None:
        """What went wrong on the device in an earlier launch; None where nothing did. Waits for the device."""
        code = self._prelude.error_code() if self._prelude is not None else 0
        return f"the prelude could not update a node (cudaError_t {code})" if code else None
