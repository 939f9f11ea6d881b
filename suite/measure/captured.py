"""Count the nodes of each CUDA graph when its capture ends, by the driver: the cross-check of what a profiler sees.

A graph captured by PyTorch is instantiated and then destroyed, so it cannot be read afterwards. While capture is still
on, `cuStreamGetCaptureInfo` returns the graph, and reading its nodes is allowed (CUDA driver API, Stream Management).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from optimizations.graph.driver import CudaCallFailed, check


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """Count nodes of one captured graph, those of child graphs included. `others`: events, host functions,
    allocations."""

    kernels: int = 0
    memcpys: int = 0
    memsets: int = 0
    others: int = 0

    def __add__(self, more: NodeCounts) -> NodeCounts:
        return NodeCounts(
            self.kernels + more.kernels,
            self.memcpys + more.memcpys,
            self.memsets + more.memsets,
            self.others + more.others,
        )


def nodes_under_capture(driver: Any, stream: int) -> NodeCounts:
    """Return counts of the graph that `stream` (a `CUstream` as a number) is being captured into.

    `driver` is `cuda.bindings.driver`.

    Raises:
        CudaCallFailed: the stream is not being captured, or a call fails.
    """
    # The driver's versions of this call return more or fewer values; status, id and graph come first in all of them.
    status, _, graph, *_ = check(driver.cuStreamGetCaptureInfo, driver.CUstream(stream))
    if status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        raise CudaCallFailed("cuStreamGetCaptureInfo", None, f"the stream is not being captured ({status})")
    return nodes_of(driver, graph)


def nodes_of(driver: Any, graph: Any) -> NodeCounts:
    """Return counts of a `CUgraph`, child graphs included."""
    kinds = driver.CUgraphNodeType
    _, count = check(driver.cuGraphGetNodes, graph, 0)
    total = NodeCounts()
    if not count:
        return total
    nodes, _ = check(driver.cuGraphGetNodes, graph, count)
    for node in nodes:
        kind = check(driver.cuGraphNodeGetType, node)
        if kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
            total += nodes_of(driver, check(driver.cuGraphChildGraphNodeGetGraph, node))
        elif kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            total += NodeCounts(kernels=1)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
            total += NodeCounts(memcpys=1)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
            total += NodeCounts(memsets=1)
        else:
            total += NodeCounts(others=1)
    return total


class CaptureLog:
    """Keep node counts of graphs captured while `recording` is on, by graph; a graph that dies takes its entry along.

    A count that fails is kept in `errors` and leaves the capture itself undisturbed.
    """

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Any, NodeCounts] = weakref.WeakKeyDictionary()
        self.errors: list[str] = []

    def count(self, graph: Any, driver: Any, stream: int) -> None:
        """Note the nodes captured so far on `stream` as those of `graph` (a `torch.cuda.CUDAGraph`)."""
        try:
            self._counts[graph] = nodes_under_capture(driver, stream)
        except CudaCallFailed as error:
            self.errors.append(str(error))

    def kernels(self, graphs: Iterable[Any]) -> int | None:
        """Return the number of kernel nodes of these graphs; None if one of them was not seen or could not be read."""
        counts = [self._counts.get(graph) for graph in graphs]
        known = [count for count in counts if count is not None]
        return sum(count.kernels for count in known) if len(known) == len(counts) else None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Count the nodes of each graph right before `torch.cuda.CUDAGraph.capture_end` ends its capture."""
        from cuda.bindings import driver

        stock = torch.cuda.CUDAGraph.capture_end
        log = self

        def capture_end(graph: torch.cuda.CUDAGraph) -> None:
            try:
                log.count(graph, driver, torch.cuda.current_stream().cuda_stream)
            finally:  # whatever goes wrong in counting: a capture that is not ended blocks its stream for good
                stock(graph)

        torch.cuda.CUDAGraph.capture_end = capture_end  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.cuda.CUDAGraph.capture_end = stock  # type: ignore[method-assign]
