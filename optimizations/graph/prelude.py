"""The applier `prelude`: a kernel at the start of the graph writes parameters of other nodes from the pointer table.

Rules of device-updatable nodes (CUDA driver API, `CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE`) that the callers
keep: the attribute is set before the graph's only instantiation and cannot be taken back; the executable graph is
uploaded before its first launch; such a node is never set from the host (an upload, or the next launch, would undo what
the device wrote), and the graph never goes through `cuGraphExecUpdate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations.graph import prelude_kernel
from optimizations.graph.driver import check
from optimizations.graph.editing import EditableGraph, LaunchParameters, pointer, unsigned
from optimizations.graph.plan import IN_KERNELS, Available, Choice, PlannedNode, Slots
from optimizations.graph.pointers import PointerUse, UseKind
from optimizations.graph.prelude_kernel import ParameterUpdate
from optimizations.graph.protocol import ApplierGpu, ApplierTools, Attached
from optimizations.graph.records import KernelNode, Node
from optimizations.graph.tensor_map import TENSOR_MAP_BYTES


@dataclass(frozen=True, slots=True)
class PreludeNode(PlannedNode):
    """A kernel node that is made device-updatable."""

    updates: tuple[ParameterUpdate, ...]

    @property
    def through_table(self) -> bool:
        return True


class Prelude:
    """Makes kernel nodes device-updatable and lets one kernel write their parameters, whatever their number."""

    stand_ins: Sequence[Choice] = (Choice.HOST,)

    def refusal(self, use: PointerUse, available: Available) -> str | None:
        return None if use.kind in IN_KERNELS else "only kernel nodes can be updated from the device"

    def planned(self, record: Node, node: PlannedNode, slots: Slots) -> PlannedNode:
        assert isinstance(record, KernelNode)
        return PreludeNode(node.node, node.applier, node.uses, tuple(_update(record, use, slots) for use in node.uses))

    def unavailable(self, gpu: ApplierGpu) -> str | None:
        reason = gpu.table_refusal() or prelude_kernel.unavailable_reason(gpu.driver_version(), gpu.target)
        if reason is None:
            try:
                prelude_kernel.build_prelude(gpu.target, gpu.cache)
            except prelude_kernel.PreludeUnavailable as error:
                reason = str(error)
        return reason

    def attach(
        self, target: EditableGraph, nodes: Sequence[PlannedNode], table_address: int, tools: ApplierTools
    ) -> Attached:
        function = tools.own_function(prelude_kernel.build_prelude, prelude_kernel.KERNEL_NAME)
        kernel = _AttachedKernel(target, nodes, function, table_address, tools.device)
        return Attached(first=(kernel.handle,), device_updatable=True, failure=kernel.failure, memory=kernel.memory)


APPLIER = Prelude()


def _update(record: KernelNode, use: PointerUse, slots: Slots) -> ParameterUpdate:
    parameter = record.parameters[use.parameter]
    window = parameter.data[use.byte_offset : use.byte_offset + TENSOR_MAP_BYTES]
    slot = slots.slot(use.input, use.delta, window if use.kind is UseKind.TENSOR_MAP else None)
    return ParameterUpdate(parameter.offset + use.byte_offset, slot)


class _AttachedKernel:
    """The prelude of a graph about to be instantiated. `memory` is what the kernel reads and writes: keep it as long as
    the graph."""

    def __init__(
        self,
        target: EditableGraph,
        nodes: Sequence[PlannedNode],
        function: Any,
        table_address: int,
        device: torch.device,
    ) -> None:
        handles = [
            (_make_updatable(target.driver, target.handle(node.node)), node.updates)
            for node in nodes
            if isinstance(node, PreludeNode)
        ]
        tables = prelude_kernel.pack_tables(handles)
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
        self.memory = (self._nodes, self._updates, self._status)
        self.handle, _ = target.add_kernel(function, tables.blocks, prelude_kernel.THREADS_PER_BLOCK, arguments)

    def failure(self) -> str | None:
        """The first update that failed in an earlier launch; None where none did. Waits for the device."""
        code = int(self._status.item())
        return f"the prelude could not update a node (cudaError_t {code})" if code else None


def _make_updatable(driver: Any, handle: Any) -> int:
    """Make a kernel node device-updatable; what the device calls it."""
    kind = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE
    value = driver.CUkernelNodeAttrValue()
    value.deviceUpdatableKernelNode.deviceUpdatable = 1
    check(driver.cuGraphKernelNodeSetAttribute, handle, kind, value)
    return int(check(driver.cuGraphKernelNodeGetAttribute, handle, kind).deviceUpdatableKernelNode.devNode)


def _on_device(content: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
