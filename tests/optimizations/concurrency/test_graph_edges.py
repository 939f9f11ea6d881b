"""The edges of a captured graph are replaced, and restored where the driver refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from optimizations.concurrency.edges import EdgesRefused, GraphEdges


class Driver:
    """A graph of the driver: handles are 100, 101, ...; an edge has its annotation."""

    def __init__(self, nodes: int) -> None:
        self.nodes = [100 + index for index in range(nodes)]
        self.edges: dict[tuple[int, int], Any] = {(a, a + 1): None for a in self.nodes[:-1]}
        self.refused: set[str] = set()
        self.refusals = 1

    def cuGraphGetNodes(self, graph: Any, count: int) -> Any:
        return 0, self.nodes[:count], len(self.nodes)

    def cuGraphGetEdges(self, graph: Any, count: int) -> Any:
        found = list(self.edges.items())[:count]
        pairs = [pair for pair, _ in found]
        return 0, [a for a, _ in pairs], [b for _, b in pairs], [data for _, data in found], len(self.edges)

    def cuGraphRemoveDependencies(self, graph: Any, sources: Any, targets: Any, data: Any, count: int) -> Any:
        if self._refuses("remove"):
            return (1,)
        for number, pair in enumerate(zip(sources, targets, strict=True)):
            assert self.edges.pop(pair) == (data[number] if data else None)
        return (0,)

    def cuGraphAddDependencies(self, graph: Any, sources: Any, targets: Any, data: Any, count: int) -> Any:
        if self._refuses("add"):
            return (1,)
        for number, pair in enumerate(zip(sources, targets, strict=True)):
            assert pair not in self.edges
            self.edges[pair] = data[number] if data else None
        return (0,)

    def _refuses(self, what: str) -> bool:
        if what in self.refused and self.refusals:
            self.refusals -= 1
            return True
        return False


def test_edges_are_replaced_and_restored() -> None:
    driver = Driver(4)
    edges = GraphEdges(driver, object(), [(0, 1), (0, 2), (1, 3), (2, 3)])
    edges.use(branched=True)
    assert set(driver.edges) == {(100, 101), (100, 102), (101, 103), (102, 103)}
    edges.use(branched=True)
    edges.use(branched=False)
    assert set(driver.edges) == {(100, 101), (101, 102), (102, 103)}


def test_programmatic_edges_are_restored_with_their_ports() -> None:
    driver = Driver(3)
    driver.edges[100, 101] = SimpleNamespace(from_port=1, type=1)
    annotated = driver.edges[100, 101]
    edges = GraphEdges(driver, object(), [(0, 1), (0, 2)])
    edges.use(branched=True)
    assert driver.edges == {(100, 101): None, (100, 102): None}
    edges.use(branched=False)
    assert driver.edges[100, 101] is annotated


@pytest.mark.parametrize("what", ["remove", "add"])
def test_refused_edge_change_keeps_the_chain(what: str) -> None:
    driver = Driver(3)
    chain = dict(driver.edges)
    edges = GraphEdges(driver, object(), [(0, 1), (0, 2)])
    driver.refused = {what}
    with pytest.raises(EdgesRefused) as refused:
        edges.use(branched=True)
    assert refused.value.is_whole
    assert driver.edges == chain
    assert not edges.is_branched


def test_unrestorable_chain_is_reported() -> None:
    driver = Driver(3)
    edges = GraphEdges(driver, object(), [(0, 1), (0, 2)])
    driver.refused, driver.refusals = {"add"}, 2
    with pytest.raises(EdgesRefused) as refused:
        edges.use(branched=True)
    assert not refused.value.is_whole


def test_graph_with_too_many_nodes_is_refused() -> None:
    with pytest.raises(EdgesRefused, match="20001 nodes"):
        GraphEdges(Driver(20_001), object(), [])
