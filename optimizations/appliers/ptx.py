"""The applier `ptx`: nodes that launch a rewritten Triton kernel, which reads its pointers from the pointer table."""

from __future__ import annotations

from typing import Any

from optimizations.captured.driver import check
from optimizations.captured.editing import EditableGraph, LaunchParameters, pointer
from optimizations.indirection.plan import PtxNode


def substitute(target: EditableGraph, node: PtxNode, function: Any, table_address: int) -> None:
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
