"""The chain of a graph is raced against branches, and the faster one is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from optimizations.concurrency.branches import BRANCHES, CHAIN, Branches
from optimizations.concurrency.launch_log import LaunchLog, Logged
from optimizations.concurrency.order import Launch
from optimizations.graph.records import CapturedGraph, Edge, KernelNode
from tests.optimizations.concurrency.test_graph_edges import Driver

INDEPENDENT = [Launch("left", 0, writes=((0, 8),)), Launch("right", 1, writes=((8, 16),))]
CHAINED = [Launch("first", 0, writes=((0, 8),)), Launch("second", 1, reads=((0, 8),), writes=((8, 16),))]


def captured(nodes: int) -> CapturedGraph:
    node = KernelNode(
        name="k", function=1, grid=(1, 1, 1), block=(1, 1, 1), shared_bytes=0,
        parameters=(),
    )  # fmt: skip
    edges = tuple(Edge(source=index, target=index + 1) for index in range(nodes - 1))
    return CapturedGraph(nodes=(node,) * nodes, edges=edges)


class Graph:
    """Record the edges of each instantiation."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.launched_with: set[tuple[int, int]] = set(driver.edges)
        self.fails = 0

    def raw_cuda_graph(self) -> int:
        return 1

    def instantiate(self) -> None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("CUDA error: out of memory\nmore")
        self.launched_with = set(self.driver.edges)


class Race:
    """Each alternative runs two calls; then `faster` wins."""

    def __init__(self, alternatives: Sequence[str], faster: str) -> None:
        self.turns = [name for name in alternatives for _ in range(2)]
        self.faster = faster
        self.winner: str | None = None
        self.median_us: dict[str, float] = {}
        self.timed: list[tuple[str, bool]] = []

    def run(self, call: Callable[[str], tuple[Any, Any]]) -> Any:
        if not self.turns:
            self.winner, self.median_us = self.faster, {CHAIN: 100.0, BRANCHES: 80.0}
            return call(self.winner)[0]
        name = self.turns.pop(0)
        result, events = call(name)
        self.timed.append((name, events is not None))
        return result


def log_of(launches: Sequence[Launch]) -> LaunchLog:
    log = LaunchLog(lambda: 0)
    log.logged += [Logged(one, False) for one in launches]
    return log


def branches_of(launches: list[Launch], faster: str = BRANCHES) -> tuple[Branches, Driver, Graph]:
    driver = Driver(len(launches))
    driver.CUgraph = lambda address: object()  # type: ignore[attr-defined]
    graph = Graph(driver)
    return Branches(log_of(launches), graph, driver, lambda names: Race(names, faster), mark=object), driver, graph


def run_all(branches: Branches, calls: int = 8) -> list[int]:
    """Calls that each launch the graph and return their number."""

    def replay(number: int) -> int:
        if branches.is_racing:
            branches.launch(lambda: None)
        return number

    return [branches.run(functools.partial(replay, number)) for number in range(calls)]


def test_faster_branches_are_kept() -> None:
    branches, driver, graph = branches_of(INDEPENDENT)
    branches.prepare(captured(2), ())
    assert branches.is_racing
    assert run_all(branches) == [*range(8)]
    assert not branches.pending
    assert branches.report().decision == "branches"
    assert driver.edges == {}
    assert graph.launched_with == set()
    assert branches.report().branches_us == 80.0


def test_slower_branches_are_replaced_by_the_chain() -> None:
    branches, driver, graph = branches_of(INDEPENDENT, faster=CHAIN)
    branches.prepare(captured(2), ())
    run_all(branches)
    assert branches.report().decision == "chain"
    assert graph.launched_with == {(100, 101)} == set(driver.edges)


def test_chain_of_dependent_launches_is_not_raced() -> None:
    branches, _, _ = branches_of(CHAINED)
    branches.prepare(captured(2), ())
    assert not branches.pending and not branches.is_racing
    assert "each kernel needs" in branches.report().reason


def test_graph_of_several_streams_keeps_its_edges() -> None:
    branches, driver, _ = branches_of(INDEPENDENT)
    branches.prepare(captured(2).model_copy(update={"edges": ()}), ())
    assert not branches.is_racing
    assert "several streams" in branches.report().reason
    assert driver.edges == {(100, 101): None}


def test_graph_with_unlogged_nodes_keeps_the_chain() -> None:
    branches, _, _ = branches_of(INDEPENDENT)
    branches.prepare(captured(3), ())
    assert "not all nodes" in branches.report().reason


def test_refused_edges_keep_the_chain_and_the_call_runs() -> None:
    branches, driver, graph = branches_of(INDEPENDENT)
    branches.prepare(captured(2), ())
    driver.refused = {"remove"}
    assert run_all(branches) == [*range(8)]
    assert branches.unusable is None
    assert graph.launched_with == {(100, 101)}
    assert branches.report().decision == "chain"


@pytest.mark.parametrize(("fails", "usable"), [(1, True), (2, False)])
def test_failed_instantiation_restores_the_chain(fails: int, usable: bool) -> None:
    branches, driver, graph = branches_of(INDEPENDENT)
    branches.prepare(captured(2), ())
    graph.fails = fails
    assert run_all(branches) == [*range(8)]
    assert (branches.unusable is None) is usable
    assert branches.report().decision == "chain"
    assert set(driver.edges) == {(100, 101)}


def test_stopped_race_keeps_the_graph() -> None:
    branches, _, graph = branches_of(INDEPENDENT)
    branches.prepare(captured(2), ())
    run_all(branches, calls=3)
    branches.stop("a parameter moved")
    assert branches.report().decision == "branches"
    assert graph.launched_with == set()
    assert run_all(branches, calls=2) == [0, 1]
