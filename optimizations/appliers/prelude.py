"""The applier `prelude`: a kernel at the start of the graph writes parameters of other nodes from the pointer table.

Rules of device-updatable nodes (CUDA driver API, `CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE`) that the callers
keep: the attribute is set before the graph's only instantiation and cannot be taken back; the executable graph is
uploaded before its first launch; such a node is never set from the host (an upload, or the next launch, would undo what
the device wrote), and the graph never goes through `cuGraphExecUpdate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from optimizations.appliers.prelude_kernel import THREADS_PER_BLOCK, pack_tables
from optimizations.captured.driver import check
from optimizations.captured.editing import EditableGraph, LaunchParameters, pointer, unsigned
from optimizations.indirection.plan import PreludeNode


class AttachedPrelude:
    """The prelude of a graph about to be instantiated. Owns what the kernel reads: keep it as long as the graph."""

    def __init__(
        self,
        target: EditableGraph,
        nodes: Sequence[PreludeNode],
        function: Any,
        table_address: int,
        device: torch.device,
    ) -> None:
        handles = [(_make_updatable(target.driver, target.handle(node.node)), node.updates) for node in nodes]
        tables = pack_tables(handles)
        self._nodes = _on_device(tables.nodes, device)
        self._updates = _on_device(tables.updates, device)
        self._status = torch.zeros(1, dtype=torch.int32, device=device)
        arguments = LaunchParameters(
            [
                pointer(table_address),
                pointer(self._nodes.data_ptr()),
                pointer(self._updates.data_ptr()),
                unsigned(tables.node_count),
                pointer(self._status.data_ptr()),
            ]
        )
        self.handle, _ = target.add_kernel(function, tables.blocks, THREADS_PER_BLOCK, arguments)

    def error_code(self) -> int:
        """The `cudaError_t` of the first update that failed, 0 where none did. Waits for the device."""
        return int(self._status.item())


def _make_updatable(driver: Any, handle: Any) -> int:
    """Make a kernel node device-updatable; what the device calls it."""
    kind = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE
    value = driver.CUkernelNodeAttrValue()
    value.deviceUpdatableKernelNode.deviceUpdatable = 1
    check(driver.cuGraphKernelNodeSetAttribute, handle, kind, value)
    return int(check(driver.cuGraphKernelNodeGetAttribute, handle, kind).deviceUpdatableKernelNode.devNode)


def _on_device(content: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
