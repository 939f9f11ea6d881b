"""Replace the edges of a captured graph: the part of the package that calls the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optimizations.graph.driver import CudaCallFailed, check
from optimizations.graph.read import node_handles

MOST_NODES = 20_000
"""Larger graphs keep the chain: editing their edges takes longer than branches could save."""


_Edges = tuple[list[Any], list[Any], list[Any] | None]
"""Edges as the driver takes them: handles of nodes, and their annotations (None: no annotation)."""


class EdgesRefused(RuntimeError):
    """Report that the driver refused to replace the edges of a graph; the message gives the reason.

    `is_whole`: whether the graph still has its previous edges. If not, it must not be instantiated again.
    """

    def __init__(self, reason: str, *, is_whole: bool) -> None:
        super().__init__(reason)
        self.is_whole = is_whole


class GraphEdges:
    """Hold the edges of one captured graph, which can be exchanged between instantiations.

    Kernels that a library launched with programmatic dependent launch have edges with ports. Only the chain has these:
    an edge in the new order always means that the earlier node is complete.

    Args:
        driver: the module `cuda.bindings.driver`.
        graph: a `CUgraph` that is no longer being captured, and outlives this object.
        order: pairs of indices of its nodes, in the order of `graph.read`. The first runs before the second.

    Raises:
        EdgesRefused: the graph has too many nodes.
        CudaCallFailed: its nodes or edges cannot be read.
    """

    def __init__(self, driver: Any, graph: Any, order: Sequence[tuple[int, int]]) -> None:
        self._driver = driver
        self._graph = graph
        handles = node_handles(driver, graph)
        if len(handles) > MOST_NODES:
            raise EdgesRefused(f"the graph has {len(handles)} nodes, more than {MOST_NODES}", is_whole=True)
        *_, count = check(driver.cuGraphGetEdges, graph, 0)
        sources, targets, data, _ = check(driver.cuGraphGetEdges, graph, count) if count else ([], [], [], 0)
        self._chain: _Edges = list(sources), list(targets), list(data)
        pairs = [(handles[earlier], handles[later]) for earlier, later in order]
        self._branched: _Edges = [one for one, _ in pairs], [other for _, other in pairs], None
        self.is_branched = False

    def use(self, *, branched: bool) -> None:
        """Put the chain's edges, or those of the new order, into the graph. It is not instantiated here.

        Raises:
            EdgesRefused: the driver refused a change.
        """
        if branched == self.is_branched:
            return
        old, new = (self._chain, self._branched) if branched else (self._branched, self._chain)
        try:
            self._change(self._driver.cuGraphRemoveDependencies, old)
        except CudaCallFailed as error:
            raise EdgesRefused(str(error), is_whole=True) from error
        try:
            self._change(self._driver.cuGraphAddDependencies, new)
        except CudaCallFailed as error:
            self._put_back(old, error)
        self.is_branched = branched

    def _put_back(self, old: _Edges, error: CudaCallFailed) -> None:
        """Put the edges back. The driver adds all edges of a call or none, so the graph has none at this point."""
        try:
            self._change(self._driver.cuGraphAddDependencies, old)
        except CudaCallFailed as another:
            raise EdgesRefused(f"{error}; and {another}", is_whole=False) from another
        raise EdgesRefused(str(error), is_whole=True) from error

    def _change(self, call: Any, edges: _Edges) -> None:
        if edges[0]:
            check(call, self._graph, *edges, len(edges[0]))
