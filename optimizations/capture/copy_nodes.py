"""Set the ends of copies inside of a graph before a launch: inputs are read, and results written, where they lie.

A copy that is launched on its own takes the host several microseconds, most of it PyTorch's and the driver's work for
one more launch. A copy that is a node of the graph is launched with it. Where it reads or writes is set in the
executable graph, only when that changed: a call of the driver for each. Launches already enqueued keep what they were
launched with (CUDA driver API, `cuGraphExecMemcpyNodeSetParams`).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from optimizations.graph.driver import CudaCallFailed, check
from optimizations.graph.read import node_handles

MOST_CARRIED = 16
"""Copies of one graph that are made its nodes; of more, one fused copy costs less than so many settings. Inputs that
one kernel copies (`fused_copies`) do not count."""


class NotCarried(RuntimeError):
    """Report that a copy cannot be found among a graph's nodes, or cannot be led elsewhere."""


class CopyNode:
    """Set the ends of one copy of contiguous memory. `graph` must be kept as long as this.

    Attributes:
        read_from: lets it copy from an address from the next launch on. Raises `NotCarried` where the driver does not
            take that.
        write_to: the same for where it copies to.
    """

    def __init__(self, driver: Any, graph: Any, executable: Any, handle: Any, context: Any) -> None:
        self._graph = graph
        self._driver = driver
        self._is_off = False
        self._set = driver.cuGraphExecMemcpyNodeSetParams
        self._switch = driver.cuGraphNodeSetEnabled
        self._executable, self._handle = executable, handle
        self._copy = check(driver.cuGraphMemcpyNodeGetParams, handle)
        self._context = context
        self.read_from = functools.partial(self._lead, "srcDevice")
        self.write_to = functools.partial(self._lead, "dstDevice")

    def _lead(self, end: str, address: int) -> None:
        setattr(self._copy, end, address)
        if code := self._set(self._executable, self._handle, self._copy, self._context)[0]:
            raise _not_taken(self._set, code)

    def switch_off(self) -> None:
        """Copy nothing from the next launch on.

        Raises:
            NotCarried: the driver does not do so.
        """
        if code := self._switch(self._executable, self._handle, 0)[0]:
            raise _not_taken(self._switch, code)
        self._is_off = True

    def renew(self) -> None:
        """Set the node in the executable that the graph has now, as it was set in the one before.

        Raises:
            NotCarried: the driver does not take that.
        """
        self._executable = self._driver.CUgraphExec(self._graph.raw_cuda_graph_exec())
        if code := self._set(self._executable, self._handle, self._copy, self._context)[0]:
            raise _not_taken(self._set, code)
        if self._is_off:
            self.switch_off()


def _not_taken(call: Any, code: object) -> NotCarried:
    return NotCarried(f"{call.__name__} failed: {code}")


def find_copies(driver: Any, graph: Any, ends: Sequence[tuple[int, int]]) -> list[CopyNode]:
    """Return the copies of an instantiated `torch.cuda.CUDAGraph`, given by the addresses they were captured with.

    Args:
        driver: the module `cuda.bindings.driver`.
        graph: made with `keep_graph=True`.
        ends: source and destination of each.

    Raises:
        NotCarried: one of them is not a memcpy node, or not the only one with these ends.
    """
    try:
        raw = driver.CUgraph(graph.raw_cuda_graph())
        executable = driver.CUgraphExec(graph.raw_cuda_graph_exec())
        context = check(driver.cuCtxGetCurrent)
        found: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for handle in node_handles(driver, raw):
            if check(driver.cuGraphNodeGetType, handle).name == "CU_GRAPH_NODE_TYPE_MEMCPY":
                copy = check(driver.cuGraphMemcpyNodeGetParams, handle)
                if copy.Height == 1 and copy.Depth == 1 and not copy.srcXInBytes and not copy.dstXInBytes:
                    found[int(copy.srcDevice), int(copy.dstDevice)].append(handle)
        handles = [found[pair] for pair in ends]
        if any(len(candidates) != 1 for candidates in handles):
            raise NotCarried("the graph does not hold exactly one memcpy node for each copy")
        return [CopyNode(driver, graph, executable, handle, context) for (handle,) in handles]
    except CudaCallFailed as error:
        raise NotCarried(str(error)) from error
