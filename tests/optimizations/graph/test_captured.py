"""Captured graphs are read from the driver into records, and files of them are validated."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from cuda.bindings import driver as cuda
from hypothesis import given
from hypothesis import strategies as st
from simulated_gpu.driver import Function, Node, SimulatedDriver
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
    addresses_between,
)

ONE_KERNEL = CapturedGraph(nodes=(kernel([bytes(8)]),), edges=())


def loaded(written: str, changed: str) -> CapturedGraph:
    text = ONE_KERNEL.model_dump_json()
    assert written in text
    return CapturedGraph.model_validate_json(text.replace(written, changed))


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
        (lambda: loaded('"offset":0', '"ofset":0'), "ofset"),
        (lambda: loaded('"offset":0', '"offset":-1'), "greater than or equal to 0"),
    ],
)
def test_record_with_a_wrong_field_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


WORDS = st.lists(st.sampled_from([b"\0" * 4, b"\1\0\0\0", b"\0\1\0\0", b"\2\1\0\0"]), max_size=7).map(b"".join)


@given(st.lists(st.lists(st.tuples(WORDS, st.binary(max_size=3)), max_size=3), max_size=4))
def test_words_of_parameters_between_two_addresses_are_found(kernels: list[list[tuple[bytes, bytes]]]) -> None:
    """They begin at every fourth byte, and lie in one parameter."""
    low, high = 0x100, 0x102_0000_0001
    contents = [[words + tail for words, tail in one] for one in kernels]
    copy = MemsetNode(address=low, pitch_bytes=0, value=0, element_bytes=4, width=1, height=1)
    expected = [
        sorted(
            value
            for content in one
            for offset in range(0, len(content) - 7, 4)
            if low <= (value := int.from_bytes(content[offset : offset + 8], "little")) < high
        )
        for one in contents
    ]
    found = addresses_between([copy, *map(kernel, contents)], low, high)
    assert list(map(sorted, found)) == [[low], *expected]


class RecordedDriver(SimulatedDriver):
    """Have a chain of nodes whose parameters are structures of the driver's own bindings."""

    def __init__(self, *nodes: tuple[str, Any], sizes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.graph = self.new_graph()
        self.function = self.add_function(Function("gemm", sizes, lambda: None))
        self.structures: dict[int, Any] = {}
        after: list[int] = []
        for kind, structure in nodes:
            after = [self.add_node(self.graph, Node(kind), after)]
            self.structures[after[0]] = structure

    def _parameters(self, node: Any) -> tuple[Any, ...]:
        return cuda.CUresult.CUDA_SUCCESS, self.structures[int(node)]

    cuGraphKernelNodeGetParams = cuGraphMemcpyNodeGetParams = cuGraphMemsetNodeGetParams = _parameters

    def launches(self, *, by_library: bool = False, kernel_params: int = 0, extra: int = 0) -> None:
        """Let the only node launch the function with these parameters."""
        (node,) = self.structures
        self.structures[node] = launch = cuda.CUDA_KERNEL_NODE_PARAMS()
        if by_library:
            launch.kern = cuda.CUkernel(self.function)
        else:
            launch.func = cuda.CUfunction(self.function)
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = 4, 2, 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = 128, 1, 1
        launch.sharedMemBytes, launch.kernelParams, launch.extra = 4096, kernel_params, extra


def test_kernel_nodes_are_read_with_launch_and_parameters() -> None:
    address, count = ctypes.c_uint64(0x7F0000001000), ctypes.c_uint32(77)
    pointers = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(count))
    driver = RecordedDriver(("KERNEL", None), sizes=(8, 4))
    driver.launches(kernel_params=ctypes.addressof(pointers))

    (node,) = read_graph(driver, driver.graph).nodes

    assert isinstance(node, KernelNode)
    assert (node.name, node.function) == ("gemm", driver.function)
    assert (node.grid, node.block, node.shared_bytes) == ((4, 2, 1), (128, 1, 1), 4096)
    assert [(p.offset, p.size) for p in node.parameters] == [(0, 8), (8, 4)]
    assert [int.from_bytes(p.data, "little") for p in node.parameters] == [0x7F0000001000, 77]

    address.value = 0
    assert any(node.parameters[0].data), "the record holds a copy, not the node's memory"


def test_library_kernels_and_packed_parameters_are_read() -> None:
    buffer = ctypes.create_string_buffer(b"\1\0\0\0....\2\0\0\0\0\0\0\0", 16)
    size = ctypes.c_size_t(16)
    extra = (ctypes.c_void_p * 5)(2, ctypes.addressof(size), 1, ctypes.addressof(buffer), None)
    driver = RecordedDriver(("KERNEL", None), sizes=(4, 8))
    driver.launches(by_library=True, extra=ctypes.addressof(extra))

    (node,) = read_graph(driver, driver.graph).nodes

    assert isinstance(node, KernelNode)
    assert (node.name, node.function) == ("gemm", driver.function)
    assert [int.from_bytes(p.data, "little") for p in node.parameters] == [1, 2]


def test_kernel_that_hides_its_parameters_is_an_error() -> None:
    driver = RecordedDriver(("KERNEL", None), sizes=(8,))
    driver.launches()
    with pytest.raises(ValueError, match="1 parameters has neither kernelParams nor extra"):
        read_graph(driver, driver.graph)
    extra = (ctypes.c_void_p * 1)(None)
    driver.launches(extra=ctypes.addressof(extra))
    with pytest.raises(ValueError, match="CU_LAUNCH_PARAM_BUFFER_POINTER"):
        read_graph(driver, driver.graph)


def test_copies_fills_and_other_nodes_are_read() -> None:
    copy = cuda.CUDA_MEMCPY3D()
    copy.srcMemoryType, copy.dstMemoryType = cuda.CUmemorytype(1), cuda.CUmemorytype(2)
    copy.srcHost, copy.dstDevice, copy.dstXInBytes, copy.dstPitch = 0x5000, cuda.CUdeviceptr(0x7F0000000000), 16, 512
    copy.WidthInBytes, copy.Height, copy.Depth = 64, 3, 1
    fill = cuda.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.value, fill.elementSize, fill.width, fill.height = cuda.CUdeviceptr(0x7F0000000400), 1, 4, 8, 1
    driver = RecordedDriver(("MEMCPY", copy), ("MEMSET", fill), ("GRAPH", None))
    chain = driver.graphs[driver.graph]
    chain.annotations[chain.edges[1]] = programmatic = cuda.CUgraphEdgeData()
    programmatic.from_port = 1

    graph = read_graph(driver, driver.graph)

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
    assert [int(handle) for handle in node_handles(driver, driver.graph)] == chain.nodes


def test_function_the_library_does_not_have_is_named() -> None:
    def cuFuncGetParamInfo(function: int, index: int) -> tuple[Any, ...]:
        raise RuntimeError('Function "cuFuncGetParamInfo" not found')

    with pytest.raises(CudaCallFailed, match=r"cuFuncGetParamInfo failed: .* not found$") as caught:
        check(cuFuncGetParamInfo, 1, 0)
    assert caught.value.code is None
