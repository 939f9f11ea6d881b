"""Read a captured `CUgraph` into records, by the driver API of `cuda.bindings` (13).

Only this module reads driver memory. All memory a node returns belongs to the node, so its bytes are copied at once.
Functions take the driver as an argument (`cuda.bindings.driver`, or a fake in tests).
"""

from __future__ import annotations

import ctypes
from typing import Any

from optimizations.graph.driver import CudaCallFailed, check
from optimizations.graph.records import (
    CapturedGraph,
    Edge,
    KernelNode,
    MemcpyEnd,
    MemcpyNode,
    MemsetNode,
    OtherNode,
    Parameter,
)

LAUNCH_PARAM_END, LAUNCH_PARAM_BUFFER_POINTER = 0, 1
"""Markers in the `extra` array of a kernel launched with one packed parameter buffer (cuda.h)."""


def read_graph(driver: Any, graph: Any) -> CapturedGraph:
    """Return all nodes and edges of `graph`.

    Args:
        driver: the module `cuda.bindings.driver`.
        graph: a `CUgraph` that is no longer being captured.

    Raises:
        CudaCallFailed: a call failed, for example because the driver is older than 12.4 and cannot return the layout of
            a kernel's parameters.
    """
    handles = node_handles(driver, graph)
    position = {int(handle): index for index, handle in enumerate(handles)}
    functions: dict[tuple[bool, int], _Function] = {}
    return CapturedGraph(
        nodes=tuple(_read_node(driver, handle, functions) for handle in handles),
        edges=_read_edges(driver, graph, position),
    )


def node_handles(driver: Any, graph: Any) -> list[Any]:
    """Return the `CUgraphNode` of each node of `read_graph(driver, graph).nodes`, in the same order."""
    _, count = check(driver.cuGraphGetNodes, graph, 0)
    return list(check(driver.cuGraphGetNodes, graph, count)[0]) if count else []


def captured_nodes(driver: Any, stream: Any) -> int:
    """Return how many nodes the graph has that a stream (`CUstream`) is being captured into."""
    _, _, graph, *_ = check(driver.cuStreamGetCaptureInfo, stream)
    return int(check(driver.cuGraphGetNodes, graph, 0)[1])


def _read_edges(driver: Any, graph: Any, position: dict[int, int]) -> tuple[Edge, ...]:
    *_, count = check(driver.cuGraphGetEdges, graph, 0)
    if not count:
        return ()
    sources, targets, data, _ = check(driver.cuGraphGetEdges, graph, count)
    return tuple(
        Edge(
            source=position[int(source)],
            target=position[int(target)],
            from_port=int(annotation.from_port),
            to_port=int(annotation.to_port),
            dependency_type=int(annotation.type),
        )
        for source, target, annotation in zip(sources, targets, data, strict=True)
    )


_Function = tuple[str | None, list[tuple[int, int]]]
"""The name of a function on the device, and the offset and size of each of its parameters, in bytes."""


def _read_node(
    driver: Any, handle: Any, functions: dict[tuple[bool, int], _Function]
) -> KernelNode | MemcpyNode | MemsetNode | OtherNode:
    kind = check(driver.cuGraphNodeGetType, handle).name.removeprefix("CU_GRAPH_NODE_TYPE_")
    match kind:
        case "KERNEL":
            return _read_kernel(driver, handle, functions)
        case "MEMCPY":
            return _read_memcpy(driver, handle)
        case "MEMSET":
            return _read_memset(driver, handle)
        case _:
            return OtherNode(type_name=kind)


def _read_kernel(driver: Any, handle: Any, functions: dict[tuple[bool, int], _Function]) -> KernelNode:
    launch = check(driver.cuGraphKernelNodeGetParams, handle)
    by_library = not int(launch.func)
    function = launch.kern if by_library else launch.func
    key = by_library, int(function)
    if (found := functions.get(key)) is None:
        get_name = driver.cuKernelGetName if by_library else driver.cuFuncGetName
        get_info = driver.cuKernelGetParamInfo if by_library else driver.cuFuncGetParamInfo
        found = _function_name(get_name, function), _parameter_layout(driver, get_info, function)
        functions[key] = found
    name, layout = found
    return KernelNode(
        name=name,
        function=int(function),
        grid=(launch.gridDimX, launch.gridDimY, launch.gridDimZ),
        block=(launch.blockDimX, launch.blockDimY, launch.blockDimZ),
        shared_bytes=launch.sharedMemBytes,
        parameters=_read_parameters(layout, launch),
    )


def _function_name(get_name: Any, function: Any) -> str | None:
    try:
        return check(get_name, function).decode(errors="replace")
    except CudaCallFailed:
        return None


def _parameter_layout(driver: Any, get_info: Any, function: Any) -> list[tuple[int, int]]:
    """Return (offset, size) of each parameter, in bytes. The list ends where the driver rejects the next index."""
    layout: list[tuple[int, int]] = []
    while True:
        try:
            offset, size = check(get_info, function, len(layout))
        except CudaCallFailed as error:
            if error.code == int(driver.CUresult.CUDA_ERROR_INVALID_VALUE):
                return layout
            raise
        layout.append((int(offset), int(size)))


def _read_parameters(layout: list[tuple[int, int]], launch: Any) -> tuple[Parameter, ...]:
    if int(launch.kernelParams):
        pointers = ctypes.cast(int(launch.kernelParams), ctypes.POINTER(ctypes.c_void_p))
        addresses = [pointers[index] or 0 for index in range(len(layout))]
    elif int(launch.extra):
        buffer = _packed_buffer(int(launch.extra))
        addresses = [buffer + offset for offset, _ in layout]
    elif layout:
        raise ValueError(f"a kernel node with {len(layout)} parameters has neither kernelParams nor extra")
    else:
        addresses = []
    return tuple(
        Parameter(offset=offset, size=size, data=ctypes.string_at(address, size))
        for (offset, size), address in zip(layout, addresses, strict=True)
    )


def _packed_buffer(extra: int) -> int:
    """Return the address of the parameter buffer in an `extra` array of (marker, value) pairs up to the end marker."""
    words = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
    index = 0
    while (marker := words[index] or LAUNCH_PARAM_END) != LAUNCH_PARAM_END:
        if marker == LAUNCH_PARAM_BUFFER_POINTER:
            return words[index + 1] or 0
        index += 2
    raise ValueError("a kernel node has an `extra` array without CU_LAUNCH_PARAM_BUFFER_POINTER")


def _read_memcpy(driver: Any, handle: Any) -> MemcpyNode:
    copy = check(driver.cuGraphMemcpyNodeGetParams, handle)
    return MemcpyNode(
        source=_memcpy_end(copy, "src"),
        destination=_memcpy_end(copy, "dst"),
        width_bytes=int(copy.WidthInBytes),
        height=int(copy.Height),
        depth=int(copy.Depth),
    )


def _memcpy_end(copy: Any, side: str) -> MemcpyEnd:
    memory = getattr(copy, f"{side}MemoryType").name.removeprefix("CU_MEMORYTYPE_").lower()
    address = {"host": "Host", "device": "Device", "unified": "Device"}.get(memory)
    return MemcpyEnd(
        memory=memory,
        address=int(getattr(copy, f"{side}{address}")) if address else 0,
        x_bytes=int(getattr(copy, f"{side}XInBytes")),
        y=int(getattr(copy, f"{side}Y")),
        z=int(getattr(copy, f"{side}Z")),
        level_of_detail=int(getattr(copy, f"{side}LOD")),
        pitch_bytes=int(getattr(copy, f"{side}Pitch")),
        height=int(getattr(copy, f"{side}Height")),
    )


def _read_memset(driver: Any, handle: Any) -> MemsetNode:
    fill = check(driver.cuGraphMemsetNodeGetParams, handle)
    return MemsetNode(
        address=int(fill.dst),
        pitch_bytes=int(fill.pitch),
        value=int(fill.value),
        element_bytes=int(fill.elementSize),
        width=int(fill.width),
        height=int(fill.height),
    )
