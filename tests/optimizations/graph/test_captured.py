"""Captured graphs are read from the driver into records, and files of them are validated."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any

import pytest
from cuda.bindings import driver as cuda
from pydantic import ValidationError
from synthetic_captures import kernel

from optimizations.graph.driver import CudaCallFailed, check
from optimizations.graph.read import node_handles, read_graph
from optimizations.graph.records import (
    Capture,
    CapturedGraph,
    Edge,
    KernelNode,
    MemcpyEnd,
    MemcpyNode,
    MemoryRange,
    MemsetNode,
    OtherNode,
    Parameter,
    Placeholder,
)

ONE_KERNEL = CapturedGraph(nodes=(kernel([bytes(8)]),), edges=())
PLACE = Placeholder(input=0, memory=MemoryRange(address=256, size_bytes=8))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Parameter(offset=0, size=8, data=bytes(7)), "has 7 bytes of data but size 8"),
        (
            lambda: CapturedGraph(nodes=ONE_KERNEL.nodes, edges=(Edge(source=0, target=1),)),
            "edge 0 -> 1 in a graph of 1",
        ),
        (lambda: MemoryRange(address=2**64, size_bytes=1), "address"),
        (lambda: Capture(graph=ONE_KERNEL, placeholders=(PLACE, PLACE)), "more than one placeholder"),
        (lambda: Capture(graph=ONE_KERNEL, placeholders=(), gridd=1), "gridd"),  # type: ignore[call-arg]
    ],
)
def test_record_with_a_wrong_field_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        make()


class FakeDriver:
    """Answers like `cuda.bindings.driver`, with the bindings' own structures, for graphs made of plain dictionaries.

    A node is `{"type": ..., "params": <structure>}`; handles are positions in `nodes`, from 100 on.
    """

    CUresult = cuda.CUresult

    def __init__(self, nodes: list[dict[str, Any]], graphs: dict[int, tuple[list[int], list[tuple[int, int, int]]]]):
        self.nodes = {100 + index: node for index, node in enumerate(nodes)}
        self.graphs = graphs
        self.functions: dict[int, dict[str, Any]] = {}
        self.fails: dict[str, IntEnum] = {}

    def _answer(self, call: str, *values: Any) -> tuple[Any, ...]:
        if call in self.fails:
            return (self.fails[call], *(None for _ in values))
        return (cuda.CUresult.CUDA_SUCCESS, *values)

    def cuGraphGetNodes(self, graph: int, count: int) -> tuple[Any, ...]:
        handles = [cuda.CUgraphNode(node) for node in self.graphs[graph][0]]
        return self._answer("cuGraphGetNodes", handles[:count], count or len(handles))

    def cuGraphGetEdges(self, graph: int, count: int) -> tuple[Any, ...]:
        edges = self.graphs[graph][1][:count]
        data = []
        for _, _, port in edges:
            annotation = cuda.CUgraphEdgeData()
            annotation.from_port = port
            data.append(annotation)
        sources = [cuda.CUgraphNode(source) for source, _, _ in edges]
        targets = [cuda.CUgraphNode(target) for _, target, _ in edges]
        return self._answer("cuGraphGetEdges", sources, targets, data, count or len(self.graphs[graph][1]))

    def cuGraphNodeGetType(self, node: Any) -> tuple[Any, ...]:
        return self._answer("cuGraphNodeGetType", self.nodes[int(node)]["type"])

    def cuGraphKernelNodeGetParams(self, node: Any) -> tuple[Any, ...]:
        return self._answer("cuGraphKernelNodeGetParams", self.nodes[int(node)]["params"])

    def cuGraphMemcpyNodeGetParams(self, node: Any) -> tuple[Any, ...]:
        return self._answer("cuGraphMemcpyNodeGetParams", self.nodes[int(node)]["params"])

    def cuGraphMemsetNodeGetParams(self, node: Any) -> tuple[Any, ...]:
        return self._answer("cuGraphMemsetNodeGetParams", self.nodes[int(node)]["params"])

    def _info(self, call: str, function: Any, index: int) -> tuple[Any, ...]:
        layout = self.functions[int(function)]["layout"]
        if index >= len(layout):
            return (cuda.CUresult.CUDA_ERROR_INVALID_VALUE, None, None)
        return self._answer(call, *layout[index])

    def cuFuncGetParamInfo(self, function: Any, index: int) -> tuple[Any, ...]:
        return self._info("cuFuncGetParamInfo", function, index)

    def cuKernelGetParamInfo(self, function: Any, index: int) -> tuple[Any, ...]:
        return self._info("cuKernelGetParamInfo", function, index)

    def cuFuncGetName(self, function: Any) -> tuple[Any, ...]:
        return self._answer("cuFuncGetName", self.functions[int(function)]["name"])

    def cuKernelGetName(self, function: Any) -> tuple[Any, ...]:
        return self._answer("cuKernelGetName", self.functions[int(function)]["name"])


def kernel_params(function: int, *, by_library: bool = False, kernel_params: int = 0, extra: int = 0) -> Any:
    launch = cuda.CUDA_KERNEL_NODE_PARAMS()
    if by_library:
        launch.kern = cuda.CUkernel(function)
    else:
        launch.func = cuda.CUfunction(function)
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = 4, 2, 1
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = 128, 1, 1
    launch.sharedMemBytes = 4096
    launch.kernelParams = kernel_params
    launch.extra = extra
    return launch


KERNEL, MEMCPY, MEMSET, GRAPH = (
    getattr(cuda.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{name}") for name in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH")
)


def test_kernel_nodes_are_read_with_launch_and_parameters() -> None:
    address, count = ctypes.c_uint64(0x7F0000001000), ctypes.c_uint32(77)
    pointers = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(count))
    launch = kernel_params(7, kernel_params=ctypes.addressof(pointers))
    driver = FakeDriver([{"type": KERNEL, "params": launch}], {1: ([100], [])})
    driver.functions[7] = {"name": b"gemm", "layout": [(0, 8), (8, 4)]}

    (node,) = read_graph(driver, 1).nodes

    assert isinstance(node, KernelNode)
    assert (node.name, node.function) == ("gemm", 7)
    assert (node.grid, node.block, node.shared_bytes) == ((4, 2, 1), (128, 1, 1), 4096)
    assert [(p.offset, p.size) for p in node.parameters] == [(0, 8), (8, 4)]
    assert int.from_bytes(node.parameters[0].data, "little") == 0x7F0000001000
    assert int.from_bytes(node.parameters[1].data, "little") == 77

    address.value = 0
    assert any(node.parameters[0].data), "the record holds a copy, not the node's memory"


def test_library_kernels_and_packed_parameters_are_read() -> None:
    buffer = ctypes.create_string_buffer(b"\1\0\0\0....\2\0\0\0\0\0\0\0", 16)
    size = ctypes.c_size_t(16)
    extra = (ctypes.c_void_p * 5)(2, ctypes.addressof(size), 1, ctypes.addressof(buffer), None)
    launch = kernel_params(9, by_library=True, extra=ctypes.addressof(extra))
    driver = FakeDriver([{"type": KERNEL, "params": launch}], {1: ([100], [])})
    driver.functions[9] = {"name": b"fft", "layout": [(0, 4), (8, 8)]}

    (node,) = read_graph(driver, 1).nodes

    assert isinstance(node, KernelNode)
    assert (node.name, node.function) == ("fft", 9)
    assert [int.from_bytes(p.data, "little") for p in node.parameters] == [1, 2]


def test_kernel_that_hides_its_parameters_is_an_error() -> None:
    driver = FakeDriver([{"type": KERNEL, "params": kernel_params(7)}], {1: ([100], [])})
    driver.functions[7] = {"name": b"k", "layout": [(0, 8)]}
    with pytest.raises(ValueError, match="1 parameters has neither kernelParams nor extra"):
        read_graph(driver, 1)
    extra = (ctypes.c_void_p * 1)(None)
    driver.nodes[100]["params"] = kernel_params(7, extra=ctypes.addressof(extra))
    with pytest.raises(ValueError, match="CU_LAUNCH_PARAM_BUFFER_POINTER"):
        read_graph(driver, 1)


def test_copies_fills_and_other_nodes_are_read() -> None:
    copy = cuda.CUDA_MEMCPY3D()
    copy.srcMemoryType, copy.dstMemoryType = cuda.CUmemorytype(1), cuda.CUmemorytype(2)
    copy.srcHost, copy.dstDevice, copy.dstXInBytes, copy.dstPitch = 0x5000, cuda.CUdeviceptr(0x7F0000000000), 16, 512
    copy.WidthInBytes, copy.Height, copy.Depth = 64, 3, 1
    fill = cuda.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.value, fill.elementSize, fill.width, fill.height = cuda.CUdeviceptr(0x7F0000000400), 1, 4, 8, 1
    nodes = [
        {"type": MEMCPY, "params": copy},
        {"type": MEMSET, "params": fill},
        {"type": GRAPH},
    ]
    driver = FakeDriver(nodes, {1: ([100, 101, 102], [(100, 101, 0), (101, 102, 1)])})

    graph = read_graph(driver, 1)

    assert graph == CapturedGraph(
        nodes=(
            MemcpyNode(
                source=MemcpyEnd(memory="host", address=0x5000),
                destination=MemcpyEnd(memory="device", address=0x7F0000000000, x_bytes=16, pitch_bytes=512),
                width_bytes=64,
                height=3,
                depth=1,
            ),
            MemsetNode(address=0x7F0000000400, pitch_bytes=0, value=1, element_bytes=4, width=8, height=1),
            OtherNode(type_name="GRAPH"),
        ),
        edges=(Edge(source=0, target=1), Edge(source=1, target=2, from_port=1)),
    )
    assert [int(handle) for handle in node_handles(driver, 1)] == [100, 101, 102]


def test_function_the_library_does_not_have_is_named() -> None:
    def cuFuncGetParamInfo(function: int, index: int) -> tuple[Any, ...]:
        raise RuntimeError('Function "cuFuncGetParamInfo" not found')

    with pytest.raises(CudaCallFailed, match=r"cuFuncGetParamInfo failed: .* not found$") as caught:
        check(cuFuncGetParamInfo, 1, 0)
    assert caught.value.code is None
