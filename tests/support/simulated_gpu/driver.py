"""A driver that runs graphs on host memory: `cuda.bindings.driver` as far as the updaters use it, with its rules kept.

Kernels are Python functions of the bytes of their parameters. Structures, enumerations and handles are of the real
bindings, which need no GPU. What CUDA calls undefined or forbids raises `RuleBroken`: writing a node's own parameter
memory, setting a device-updatable node from the host, instantiating such a graph twice, launching it without an upload.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from cuda.bindings import driver as real

from optimizations.graph.prelude import KERNEL_NAME
from optimizations.graph.table import CAPACITIES
from optimizations.graph.table import KERNEL_NAME as TABLE_KERNEL

OK, INVALID = real.CUresult.CUDA_SUCCESS, real.CUresult.CUDA_ERROR_INVALID_VALUE
UPDATABLE = real.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE


class RuleBroken(AssertionError):
    """Something was done that CUDA forbids."""


@dataclass(eq=False)
class Function:
    """A kernel: the sizes of its parameters, and what it does with their bytes. `body` may use the running graph."""

    name: str
    sizes: tuple[int, ...]
    body: Callable[..., None]

    @property
    def offsets(self) -> list[int]:
        """Return where parameters lie in the parameter buffer: each aligned to its size, at most to 8."""
        offsets, end = [], 0
        for size in self.sizes:
            alignment = min(size, 8)
            end = -(-end // alignment) * alignment
            offsets.append(end)
            end += size
        return offsets


@dataclass(eq=False)
class Node:
    kind: str
    function: Function | None = None
    parameters: list[bytes] = field(default_factory=list)
    grid: tuple[int, int, int] = (1, 1, 1)
    shared: int = 64
    copy: dict[str, int] = field(default_factory=dict)
    fill: dict[str, int] = field(default_factory=dict)
    updatable: bool = False
    original: Node | None = None
    live_results: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class Graph:
    nodes: list[int] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    annotations: dict[tuple[int, int], Any] = field(default_factory=dict)
    executables: int = 0


@dataclass(eq=False)
class Executable:
    graph: Graph
    parameters: dict[int, list[bytes]]
    copies: dict[int, dict[str, int]]
    fills: dict[int, dict[str, int]]
    nodes: tuple[int, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    uploaded: bool = False
    updatable: set[int] = field(default_factory=set)
    disabled: set[int] = field(default_factory=set)
    order: list[int] = field(default_factory=list)


def word(address: int) -> bytes:
    return address.to_bytes(8, "little")


def floats(address: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(address)


class SimulatedDriver:
    """See the module. `calls` lists the names of the calls made."""

    CUfunction_attribute = real.CUfunction_attribute
    CUkernelNodeAttrID = real.CUkernelNodeAttrID
    CUkernelNodeAttrValue = real.CUkernelNodeAttrValue
    CUresult = real.CUresult
    CUDA_KERNEL_NODE_PARAMS = real.CUDA_KERNEL_NODE_PARAMS
    CUgraph = real.CUgraph
    CUgraphExec = real.CUgraphExec
    CUkernel = real.CUkernel
    CUstream = real.CUstream
    CUstreamCaptureMode = real.CUstreamCaptureMode
    begin_capture: Callable[[], None]
    end_capture: Callable[[], int]

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.functions: dict[int, Function] = {}
        self.nodes: dict[int, Node] = {}
        self.graphs: dict[int, Graph] = {}
        self.executables: dict[int, Executable] = {}
        self._handles = itertools.count(0x1000, 0x10)
        self._running: Executable | None = None
        self.table_functions = {
            capacity: self.add_function(Function(TABLE_KERNEL, (8, 4, capacity * 8), self._write_table))
            for capacity in CAPACITIES
        }
        self.prelude_function = self.add_function(Function("encore_prelude", (8, 8, 8, 4, 8), self._run_prelude))
        self.failing: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("cu"):
            return value

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name not in self.failing:
                return value(*arguments)
            if name == "cuStreamEndCapture":
                self.end_capture()  # it ends all the same
            return (INVALID,)

        call.__name__ = name
        return call

    # Building what a capture would have built.

    def handle(self) -> int:
        return next(self._handles)

    def add_function(self, function: Function) -> int:
        handle = self.handle()
        self.functions[handle] = function
        return handle

    def new_graph(self) -> int:
        handle = self.handle()
        self.graphs[handle] = Graph()
        return handle

    def add_node(self, graph: int, node: Node, after: Sequence[int] = ()) -> int:
        handle = self.handle()
        self.nodes[handle] = node
        self.graphs[graph].nodes.append(handle)
        self.graphs[graph].edges += [(other, handle) for other in after]
        return handle

    # Reading.

    def cuGraphGetNodes(self, graph: Any, count: int) -> tuple[Any, ...]:
        nodes = self.graphs[int(graph)].nodes
        return OK, [real.CUgraphNode(node) for node in nodes] if count else None, len(nodes)

    def cuGraphGetEdges(self, graph: Any, count: int) -> tuple[Any, ...]:
        of = self.graphs[int(graph)]
        sources, targets = ([real.CUgraphNode(edge[side]) for edge in of.edges] for side in (0, 1))
        data = [of.annotations.get(edge, real.CUgraphEdgeData()) for edge in of.edges]
        return OK, sources, targets, data, len(of.edges)

    def cuGraphGetRootNodes(self, graph: Any, count: int) -> tuple[Any, ...]:
        of = self.graphs[int(graph)]
        waiting = {target for _, target in of.edges}
        roots = [node for node in of.nodes if node not in waiting]
        return OK, [real.CUgraphNode(node) for node in roots] if count else None, len(roots)

    def cuGraphNodeGetType(self, node: Any) -> tuple[Any, ...]:
        return OK, getattr(real.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{self.nodes[int(node)].kind}")

    def cuGraphKernelNodeGetParams(self, node: Any) -> tuple[Any, ...]:
        record = self.nodes[int(node)]
        assert record.function is not None
        buffers = [ctypes.create_string_buffer(content, len(content)) for content in record.parameters]
        array = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        record.live_results.append((buffers, array, [bytes(buffer) for buffer in buffers]))
        launch = real.CUDA_KERNEL_NODE_PARAMS()
        launch.func = next(handle for handle, function in self.functions.items() if function is record.function)
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = record.grid
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = 32, 1, 1
        launch.sharedMemBytes = record.shared
        launch.kernelParams = ctypes.addressof(array)
        return OK, launch

    def cuFuncGetParamInfo(self, function: Any, index: int) -> tuple[Any, ...]:
        known = self.functions[int(function)]
        return (OK, known.offsets[index], known.sizes[index]) if index < len(known.sizes) else (INVALID, 0, 0)

    def cuFuncGetName(self, function: Any) -> tuple[Any, ...]:
        return OK, self.functions[int(function)].name.encode()

    cuKernelGetParamInfo, cuKernelGetName = cuFuncGetParamInfo, cuFuncGetName

    def cuGraphKernelNodeGetAttribute(self, node: Any, kind: Any) -> tuple[Any, ...]:
        value = real.CUkernelNodeAttrValue()
        if kind == UPDATABLE and self.nodes[int(node)].updatable:
            # A structure's handle cannot be set from Python: int, padding, handle.
            ctypes.memmove(int(value.getPtr()), struct.pack("<iiQ", 1, 0, int(node)), 16)
        return OK, value

    def cuGraphMemcpyNodeGetParams(self, node: Any) -> tuple[Any, ...]:
        record = self.nodes[int(node)].copy
        copy = real.CUDA_MEMCPY3D()
        copy.srcMemoryType = copy.dstMemoryType = real.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.dstDevice = record["source"], record["destination"]
        copy.WidthInBytes, copy.Height, copy.Depth = record["bytes"], record.get("height", 1), 1
        return OK, copy

    def cuGraphMemsetNodeGetParams(self, node: Any) -> tuple[Any, ...]:
        record = self.nodes[int(node)].fill
        fill = real.CUDA_MEMSET_NODE_PARAMS()
        fill.dst, fill.value, fill.elementSize, fill.width, fill.height = record["address"], 7, 1, record["bytes"], 1
        return OK, fill

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return OK, real.CUcontext(1)

    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[Any, ...]:
        self.begin_capture()
        return (OK,)

    def cuStreamEndCapture(self, stream: Any) -> tuple[Any, ...]:
        return OK, real.CUgraph(self.end_capture())

    # Changing a graph.

    def cuGraphKernelNodeSetAttribute(self, node: Any, kind: Any, value: Any) -> tuple[Any, ...]:
        assert kind == UPDATABLE and value.deviceUpdatableKernelNode.deviceUpdatable == 1
        self.nodes[int(node)].updatable = True
        return (OK,)

    def cuGraphAddKernelNode(self, graph: Any, after: Any, count: int, launch: Any) -> tuple[Any, ...]:
        assert not after and not count
        function = self.functions[int(launch.func)]
        grid = (launch.gridDimX, launch.gridDimY, launch.gridDimZ)
        node = Node("KERNEL", function, self._arguments(function, launch), grid, launch.sharedMemBytes)
        return OK, real.CUgraphNode(self.add_node(int(graph), node))

    def cuGraphAddDependencies(self, graph: Any, sources: Any, targets: Any, data: Any, count: int) -> tuple[Any, ...]:
        assert len(sources) == len(targets) == count
        edges = [(int(a), int(b)) for a, b in zip(sources, targets, strict=True)]
        self.graphs[int(graph)].edges += edges
        self.graphs[int(graph)].annotations.update(zip(edges, data or (), strict=bool(data)))
        return (OK,)

    def cuGraphRemoveDependencies(
        self, graph: Any, sources: Any, targets: Any, data: Any, count: int
    ) -> tuple[Any, ...]:
        assert len(sources) == len(targets) == count
        of = self.graphs[int(graph)]
        for number, edge in enumerate(zip(map(int, sources), map(int, targets), strict=True)):
            of.edges.remove(edge)
            if of.annotations.pop(edge, None) not in (None, data[number] if data else None):
                raise RuleBroken("an edge was removed without its annotation")
        return (OK,)

    def cuGraphCreate(self, flags: int) -> tuple[Any, ...]:
        return OK, real.CUgraph(self.new_graph())

    def cuStreamSynchronize(self, stream: Any) -> tuple[Any, ...]:
        return (OK,)

    # Executables.

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, ...]:
        of = self.graphs[int(graph)]
        updatable = {node for node in of.nodes if self.nodes[node].updatable}
        if of.executables and updatable:
            raise RuleBroken("a graph with device-updatable nodes was instantiated twice")
        of.executables += bool(updatable)
        handle = self.handle()
        self.executables[handle] = Executable(
            of,
            {node: list(self.nodes[node].parameters) for node in of.nodes},
            {node: dict(self.nodes[node].copy) for node in of.nodes},
            {node: dict(self.nodes[node].fill) for node in of.nodes},
            nodes=tuple(of.nodes),
            edges=tuple(of.edges),
            updatable=updatable,
        )
        return OK, real.CUgraphExec(handle)

    def cuGraphUpload(self, executable: Any, stream: Any) -> tuple[Any, ...]:
        self.executables[int(executable)].uploaded = True
        return (OK,)

    def cuGraphExecKernelNodeSetParams(self, executable: Any, node: Any, launch: Any) -> tuple[Any, ...]:
        record = self.nodes[int(node)]
        if record.updatable:
            raise RuleBroken("a device-updatable node was set from the host")
        assert record.function is not None
        grid = (launch.gridDimX, launch.gridDimY, launch.gridDimZ)
        if grid != record.grid or launch.sharedMemBytes != record.shared:
            raise RuleBroken("launch fields were not carried over")
        self.executables[int(executable)].parameters[int(node)] = self._arguments(record.function, launch)
        return (OK,)

    def cuGraphExecMemcpyNodeSetParams(self, executable: Any, node: Any, copy: Any, context: Any) -> tuple[Any, ...]:
        assert int(context) == 1
        if copy.Height * copy.Depth != 1:
            return (INVALID,)
        ends = {"source": int(copy.srcDevice), "destination": int(copy.dstDevice), "bytes": int(copy.WidthInBytes)}
        self.executables[int(executable)].copies[int(node)] = ends
        return (OK,)

    def cuGraphExecMemsetNodeSetParams(self, executable: Any, node: Any, fill: Any, context: Any) -> tuple[Any, ...]:
        assert int(context) == 1
        self.executables[int(executable)].fills[int(node)] = {"address": int(fill.dst), "bytes": int(fill.width)}
        return (OK,)

    def cuGraphNodeSetEnabled(self, executable: Any, node: Any, enabled: int) -> tuple[Any, ...]:
        if self.nodes[int(node)].updatable:
            raise RuleBroken("a device-updatable node was switched from the host")
        disabled = self.executables[int(executable)].disabled
        (disabled.discard if enabled else disabled.add)(int(node))
        return (OK,)

    def cuGraphLaunch(self, executable: Any, stream: Any) -> tuple[Any, ...]:
        self.launch(int(executable))
        return (OK,)

    def cuGraphExecDestroy(self, executable: Any) -> tuple[Any, ...]:
        del self.executables[int(executable)]
        return (OK,)

    def cuGraphDestroy(self, graph: Any) -> tuple[Any, ...]:
        del self.graphs[int(graph)]
        return (OK,)

    def launch(self, executable: int) -> None:
        """Run a graph now, its nodes in an order that its edges allow."""
        run = self.executables[executable]
        nodes = run.nodes
        if run.updatable and not run.uploaded:
            raise RuleBroken("a graph with device-updatable nodes was launched without an upload")
        waiting = {node: sum(target == node for _, target in run.edges) for node in nodes}
        ready = [node for node in nodes if not waiting[node]]
        self._running = run
        run.order = []
        while ready:
            node = ready.pop(0)
            run.order.append(node)
            if node not in run.disabled:
                self._run_node(run, node)
            for source, target in run.edges:
                if source == node:
                    waiting[target] -= 1
                    if not waiting[target]:
                        ready.append(target)
        assert len(run.order) == len(nodes), "the graph has a cycle"
        self._running = None

    def check_node_memory(self) -> None:
        """Check that no parameter memory that was returned has been written."""
        for node in self.nodes.values():
            for buffers, _, contents in node.live_results:
                if [bytes(buffer) for buffer in buffers] != contents:
                    raise RuleBroken("parameter memory of a node was written")

    def _run_node(self, run: Executable, node: int) -> None:
        record = self.nodes[node]
        match record.kind:
            case "KERNEL":
                assert record.function is not None
                record.function.body(*run.parameters[node])
            case "MEMCPY":
                copy = run.copies[node]
                ctypes.memmove(copy["destination"], copy["source"], copy["bytes"])
            case "MEMSET":
                ctypes.memset(run.fills[node]["address"], 7, run.fills[node]["bytes"])

    @staticmethod
    def _arguments(function: Function, launch: Any) -> list[bytes]:
        assert not launch.extra
        pointers = (ctypes.c_void_p * len(function.sizes)).from_address(int(launch.kernelParams))
        return [ctypes.string_at(pointers[index] or 0, size) for index, size in enumerate(function.sizes)]

    def _write_table(self, destination: bytes, count: bytes, words: bytes) -> None:
        size = int.from_bytes(count, "little") * 8
        ctypes.memmove(int.from_bytes(destination, "little"), words[:size], size)

    def _run_prelude(self, table: bytes, nodes: bytes, updates: bytes, count: bytes, status: bytes) -> None:
        run = self._running
        assert run is not None
        table_at, nodes_at, updates_at = (int.from_bytes(pointer, "little") for pointer in (table, nodes, updates))
        for index in range(int.from_bytes(count, "little")):
            node, first, number = struct.unpack("<QII", ctypes.string_at(nodes_at + 16 * index, 16))
            if node in run.order:
                raise RuleBroken("a node was updated after it had run")
            record = self.nodes[node]
            assert record.updatable and record.function is not None
            for update in range(first, first + number):
                offset, slot, size = struct.unpack("<III", ctypes.string_at(updates_at + 12 * update, 12))
                content = ctypes.string_at(table_at + slot, size)
                places = zip(record.function.offsets, record.function.sizes, strict=True)
                place, start = next(
                    (place, offset - begin)
                    for place, (begin, length) in enumerate(places)
                    if begin <= offset and offset + size <= begin + length
                )
                old = run.parameters[node][place]
                run.parameters[node][place] = old[:start] + content + old[start + size :]


class SimulatedTools:
    """`recording.Tools` over a simulated driver. `read_on`: what is still read, by address, and on which stream."""

    device = torch.device("cpu")
    against_prelude: str | None = None

    def __init__(self, driver: SimulatedDriver, replace_address: Any = None) -> None:
        self.driver = driver
        self.replace_address = replace_address
        self.read_on: list[tuple[int, int]] = []

    def is_current(self) -> bool:
        return True

    def on_device(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def stream(self) -> Any:
        return real.CUstream(0)

    def free_bytes(self) -> int:
        return 2**40

    def still_read(self, memory: Iterable[torch.Tensor], stream: Any) -> None:
        read_on = 0 if stream is None else stream.cuda_stream
        self.read_on += [(tensor.data_ptr(), read_on) for tensor in memory]

    def function(self, build: Any, name: str, *arguments: Any) -> Any:
        """The table's kernel for a capacity, or the prelude."""
        known = {TABLE_KERNEL: self.driver.table_functions, KERNEL_NAME: {(): self.driver.prelude_function}}
        return real.CUfunction(known[name][arguments[0] if arguments else ()])


class SimulatedGraph:
    """`torch.cuda.CUDAGraph(keep_graph=True)` after a capture that made `graph`."""

    def __init__(self, driver: SimulatedDriver, graph: int) -> None:
        self.driver = driver
        self.graph = graph
        self.executable: int | None = None
        self.instantiations = 0

    def raw_cuda_graph(self) -> int:
        return self.graph

    def instantiate(self) -> None:
        # Past the driver object, which counts calls and may fail on purpose: this is PyTorch's own call.
        self.executable = int(SimulatedDriver.cuGraphInstantiate(self.driver, real.CUgraph(self.graph), 0)[1])
        self.instantiations += 1

    def raw_cuda_graph_exec(self) -> int:
        assert self.executable is not None
        return self.executable

    def replay(self) -> None:
        assert self.executable is not None
        self.driver.launch(self.executable)


@contextlib.contextmanager
def fails(driver: SimulatedDriver, *calls: str) -> Iterator[None]:
    """These calls return an error inside the block."""
    driver.failing |= set(calls)
    try:
        yield
    finally:
        driver.failing -= set(calls)
