"""Nodes of a graph under capture are counted by the driver's own lists, and a failed count harms no capture."""

from __future__ import annotations

import enum
import gc
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from optimizations.graph.driver import CudaCallFailed
from suite.measure.captured import CaptureLog, NodeCounts, nodes_under_capture


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class Kind(enum.IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_GRAPH = 4
    CU_GRAPH_NODE_TYPE_EMPTY = 5


class Capture(enum.IntEnum):
    CU_STREAM_CAPTURE_STATUS_NONE = 0
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1


class FakeDriver:
    """`cuda.bindings.driver` over graphs that are lists of kinds, or of lists for child graphs."""

    CUgraphNodeType = Kind
    CUstreamCaptureStatus = Capture

    def __init__(self, graph: list, status: Capture = Capture.CU_STREAM_CAPTURE_STATUS_ACTIVE, failing: str = ""):
        self.graph, self.status, self.failing = graph, status, failing

    def CUstream(self, handle: int) -> int:
        return handle

    def _answer(self, call: str, *values: object) -> tuple:
        if call == self.failing:
            return (Result.CUDA_ERROR_INVALID_VALUE, *[None] * len(values))
        return (Result.CUDA_SUCCESS, *values)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple:
        return self._answer("cuStreamGetCaptureInfo", self.status, 1, self.graph, [], [], 0)

    def cuGraphGetNodes(self, graph: list, count: int) -> tuple:
        return self._answer("cuGraphGetNodes", graph[:count], len(graph))

    def cuGraphNodeGetType(self, node: object) -> tuple:
        kind = Kind.CU_GRAPH_NODE_TYPE_GRAPH if isinstance(node, list) else node
        return self._answer("cuGraphNodeGetType", kind)

    def cuGraphChildGraphNodeGetGraph(self, node: list) -> tuple:
        return self._answer("cuGraphChildGraphNodeGetGraph", node)


KERNEL, COPY, SET, EMPTY = (
    Kind.CU_GRAPH_NODE_TYPE_KERNEL,
    Kind.CU_GRAPH_NODE_TYPE_MEMCPY,
    Kind.CU_GRAPH_NODE_TYPE_MEMSET,
    Kind.CU_GRAPH_NODE_TYPE_EMPTY,
)


def test_nodes_are_counted_by_kind_and_in_child_graphs_too():
    graph = [KERNEL, COPY, [KERNEL, [KERNEL, SET], EMPTY], KERNEL]
    assert nodes_under_capture(FakeDriver(graph), 7) == NodeCounts(kernels=4, memcpys=1, memsets=1, others=1)
    assert nodes_under_capture(FakeDriver([]), 7) == NodeCounts()


@pytest.mark.parametrize(
    "call", ["cuStreamGetCaptureInfo", "cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphChildGraphNodeGetGraph"]
)
def test_a_call_that_fails_is_named(call):
    with pytest.raises(CudaCallFailed, match=f"{call} failed: .*INVALID_VALUE|{call} failed: 1"):
        nodes_under_capture(FakeDriver([KERNEL, [KERNEL]], failing=call), 7)


def test_a_stream_that_is_not_captured_is_an_error():
    with pytest.raises(CudaCallFailed, match="not being captured"):
        nodes_under_capture(FakeDriver([KERNEL], Capture.CU_STREAM_CAPTURE_STATUS_NONE), 7)


class Graph:
    """In place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.ended = False

    def capture_end(self) -> None:
        self.ended = True


@pytest.fixture
def captured(monkeypatch):
    """A function that captures a graph of these nodes under a recording log, with no GPU."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))

    def capture(log: CaptureLog, driver: FakeDriver) -> Graph:
        bindings = ModuleType("cuda.bindings")
        bindings.driver = driver  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        graph = Graph()
        with log.recording():
            graph.capture_end()
        return graph

    return capture


def test_kernels_of_live_graphs_add_up(captured):
    log = CaptureLog()
    first = captured(log, FakeDriver([KERNEL, KERNEL, COPY]))
    second = captured(log, FakeDriver([KERNEL]))
    assert first.ended and second.ended
    assert log.kernels([first, second]) == 3
    assert log.kernels([second]) == 1
    assert log.kernels([]) == 0
    assert log.kernels([first, Graph()]) is None  # one that was never seen


def test_a_count_that_fails_leaves_the_capture_to_end(captured):
    log = CaptureLog()
    graph = captured(log, FakeDriver([KERNEL], failing="cuGraphGetNodes"))
    assert graph.ended
    assert log.kernels([graph]) is None
    assert log.errors and "cuGraphGetNodes" in log.errors[0]


def test_a_driver_without_the_call_costs_the_count_only(captured):
    """How the bindings say that the installed library does not have a function."""

    class OldDriver(FakeDriver):
        def cuStreamGetCaptureInfo(self, stream: int) -> tuple:
            raise RuntimeError('Function "cuStreamGetCaptureInfo" not found')

    log = CaptureLog()
    graph = captured(log, OldDriver([KERNEL]))
    assert graph.ended
    assert log.kernels([graph]) is None
    assert log.errors and "not found" in log.errors[0]


def test_a_count_that_crashes_leaves_the_capture_to_end(captured):
    graphs: list[Graph] = []
    broken = FakeDriver([KERNEL])
    broken.cuGraphGetNodes = None  # type: ignore[method-assign, assignment]
    original = Graph.capture_end
    Graph.capture_end = lambda self: (graphs.append(self), original(self))[1]  # type: ignore[method-assign]
    try:
        with pytest.raises(TypeError):
            captured(CaptureLog(), broken)
    finally:
        Graph.capture_end = original  # type: ignore[method-assign]
    assert graphs[0].ended


def test_log_keeps_no_graph_alive_and_restores_the_stock_method(captured):
    stock = Graph.capture_end
    log = CaptureLog()
    graph = captured(log, FakeDriver([KERNEL]))
    assert Graph.capture_end is stock
    del graph
    gc.collect()
    assert len(log._counts) == 0
