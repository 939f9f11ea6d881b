"""The applier `ptx`: nodes that launch a rewritten Triton kernel, which reads its pointers from the pointer table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optimizations.graph.driver import check
from optimizations.graph.editing import EditableGraph, LaunchParameters, pointer
from optimizations.graph.plan import Available, Choice, PlannedNode, Slot, Slots
from optimizations.graph.pointers import PointerUse, UseKind
from optimizations.graph.protocol import ApplierGpu, ApplierTools, Attached
from optimizations.graph.records import Node


@dataclass(frozen=True, slots=True)
class PtxNode(PlannedNode):
    """A kernel node that launches the rewritten kernel: each parameter listed takes the address of its slot."""

    parameters: tuple[tuple[int, Slot], ...]

    @property
    def through_table(self) -> bool:
        return True


class Ptx:
    """Lets nodes launch a variant of their Triton kernel that reads its pointers from the table itself."""

    stand_ins: Sequence[Choice] = (Choice.PRELUDE, Choice.HOST)

    def refusal(self, use: PointerUse, available: Available) -> str | None:
        if use.kind is not UseKind.PARAMETER:
            return "only pointer parameters of kernels can be dereferenced"
        if use.node not in available.ptx:
            return "no PTX of this kernel is available"
        if use.byte_offset:
            return f"the pointer lies {use.byte_offset} bytes into parameter {use.parameter}"
        refusals = available.ptx[use.node]
        if not refusals:
            return "the PTX of this kernel cannot be read or is not understood"
        if use.parameter >= len(refusals):
            return f"its PTX has {len(refusals)} parameters only, so it is of another kernel"
        return refusals[use.parameter]

    def planned(self, record: Node, node: PlannedNode, slots: Slots) -> PlannedNode:
        parameters = tuple((use.parameter, slots.slot(use.input, use.delta)) for use in node.uses)
        return PtxNode(node.node, node.applier, node.uses, parameters)

    def unavailable(self, gpu: ApplierGpu) -> str | None:
        return gpu.table_refusal()

    def attach(
        self, target: EditableGraph, nodes: Sequence[PlannedNode], table_address: int, tools: ApplierTools
    ) -> Attached:
        for node in nodes:
            assert isinstance(node, PtxNode)
            replaced = [parameter for parameter, _ in node.parameters]
            function = tools.rewritten_function(replaced, target.kernel(node.node))
            _substitute(target, node, function, table_address)
        return Attached()


APPLIER = Ptx()


def _substitute(target: EditableGraph, node: PtxNode, function: Any, table_address: int) -> None:
    """Let `node` launch `function`, each indirected parameter holding the address of its slot.

    To be called before the graph is instantiated. Everything else of the launch stays as captured, attributes included.
    """
    record = target.kernel(node.node)
    handle = target.handle(node.node)
    arguments = LaunchParameters([parameter.data for parameter in record.parameters])
    for parameter, slot in node.parameters:
        arguments.write(parameter, 0, pointer(table_address + slot.offset_bytes))
    launch = check(target.driver.cuGraphKernelNodeGetParams, handle)
    launch.func = function
    launch.kern = target.driver.CUkernel(0)
    launch.kernelParams = arguments.address
    launch.extra = 0
    check(target.driver.cuGraphKernelNodeSetParams, handle, launch)
