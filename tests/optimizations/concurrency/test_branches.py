"""The chain of a graph is raced against branches, whose edges are replaced, and the faster one is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from cuda.bindings import driver as real
from simulated_gpu.driver import Function, Node, SimulatedDriver, SimulatedGraph, fails
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import COUNT, Compiled, Model, values, word

from optimizations.concurrency import launch_log
from optimizations.concurrency.branches import BRANCHES, CHAIN, Branches
from optimizations.concurrency.edges import EdgesRefused, GraphEdges
from optimizations.concurrency.launch_log import LaunchLog, Logged
from optimizations.concurrency.order import Launch
from optimizations.graph.read import read_graph
from optimizations.trees import node

# The chain of a graph is raced against branches, and the faster one is kept.


INDEPENDENT = [Launch("left", 0, writes=((0, 8),)), Launch("right", 1, writes=((8, 16),))]
CHAINED = [Launch("first", 0, writes=((0, 8),)), Launch("second", 1, reads=((0, 8),), writes=((8, 16),))]


def chain_of(nodes: int) -> SimulatedGraph:
    """Return an instantiated graph of so many nodes, each of which waits for the one before it."""
    driver = SimulatedDriver()
    kernel = Function("k", (), lambda: None)
    driver.add_function(kernel)
    graph, after = driver.new_graph(), list[int]()
    for _ in range(nodes):
        after = [driver.add_node(graph, Node("KERNEL", kernel), after)]
    chain = SimulatedGraph(driver, graph)
    chain.instantiate()
    return chain


def edges_of(graph: SimulatedGraph) -> list[tuple[int, int]]:
    """Return the edges of the executable, as indices of nodes; the graph has the same."""
    assert graph.executable is not None
    launched, nodes = graph.driver.executables[graph.executable].edges, graph.driver.graphs[graph.graph].nodes
    assert list(launched) == graph.driver.graphs[graph.graph].edges
    return [(nodes.index(one), nodes.index(other)) for one, other in launched]


def test_programmatic_edges_are_restored_with_their_ports() -> None:
    graph = chain_of(3)
    of = graph.driver.graphs[graph.graph]
    programmatic = real.CUgraphEdgeData()
    of.annotations[of.edges[0]] = programmatic
    edges = GraphEdges(graph.driver, graph.graph, [(0, 1), (0, 2)])
    edges.use(branched=True)
    assert of.edges == [(of.nodes[0], of.nodes[1]), (of.nodes[0], of.nodes[2])] and not of.annotations
    edges.use(branched=False)
    assert of.annotations[of.edges[0]] is programmatic


def test_unrestorable_chain_is_reported() -> None:
    graph = chain_of(3)
    edges = GraphEdges(graph.driver, graph.graph, [(0, 1), (0, 2)])
    with fails(graph.driver, "cuGraphAddDependencies"), pytest.raises(EdgesRefused) as refused:
        edges.use(branched=True)
    assert not refused.value.is_whole


def test_graph_with_too_many_nodes_is_refused() -> None:
    graph = chain_of(20_001)
    with pytest.raises(EdgesRefused, match="20001 nodes"):
        GraphEdges(graph.driver, graph.graph, [])


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


def branches_of(launches: list[Launch], graph: SimulatedGraph | None = None, faster: str = BRANCHES) -> Branches:
    """Return the branches of a chain of these launches, ready to race."""
    graph = graph or chain_of(len(launches))
    branches = Branches(log_of(launches), graph, graph.driver, lambda names: Race(names, faster), mark=object)
    branches.prepare(read_graph(graph.driver, graph.graph), ())
    return branches


def run_all(branches: Branches, calls: int = 8) -> None:
    """Make calls that each launch the graph and return their number."""

    def replay(number: int) -> int:
        if branches.is_racing:
            branches.launch(lambda: None)
        return number

    assert [branches.run(functools.partial(replay, number)) for number in range(calls)] == [*range(calls)]


@pytest.mark.parametrize(("faster", "edges"), [(BRANCHES, []), (CHAIN, [(0, 1)])])
def test_graph_has_the_edges_of_the_faster_alternative(faster: str, edges: list[tuple[int, int]]) -> None:
    branches = branches_of(INDEPENDENT, graph := chain_of(2), faster)
    assert branches.is_racing
    run_all(branches)
    assert not branches.pending
    assert (branches.report().decision, branches.report().branches_us) == (faster, 80.0)
    assert edges_of(graph) == edges


def test_graph_of_several_streams_keeps_its_edges() -> None:
    graph = chain_of(2)
    graph.driver.graphs[graph.graph].edges.clear()
    assert "several streams" in branches_of(INDEPENDENT, graph).report().reason


@pytest.mark.parametrize(
    ("launches", "nodes", "reason"), [(CHAINED, 2, "each kernel needs"), (INDEPENDENT, 3, "not all nodes")]
)
def test_graph_that_cannot_be_ordered_keeps_the_chain(launches: list[Launch], nodes: int, reason: str) -> None:
    branches = branches_of(launches, graph := chain_of(nodes))
    assert not branches.pending and not branches.is_racing
    assert reason in branches.report().reason
    assert len(edges_of(graph)) == nodes - 1


@pytest.mark.parametrize(("failures", "usable"), [(1, True), (2, False)])
def test_failed_instantiation_restores_the_chain(failures: int, usable: bool) -> None:
    branches = branches_of(INDEPENDENT, graph := chain_of(2))
    errors = [RuntimeError("CUDA error: out of memory\nmore")] * failures
    with mock.patch.object(graph, "instantiate", side_effect=[*errors, *[None] * 8]):
        run_all(branches)
    assert (branches.unusable is None) is usable
    assert branches.report().decision == "chain"
    assert edges_of(graph) == [(0, 1)]


def test_stopped_race_keeps_the_graph() -> None:
    branches = branches_of(INDEPENDENT, graph := chain_of(2))
    run_all(branches, calls=3)
    branches.stop("a parameter moved")
    assert branches.report().decision == "branches"
    assert edges_of(graph) == []
    run_all(branches, calls=2)


# A recording's chain is raced against branches in the program's calls, before its inputs are read in place.


class TwoKernels(Model):
    """out = 2 * x + y * w twice, by two kernels that do not depend on each other."""

    def __call__(self, inputs: list[Any]) -> list[Any]:
        x, y, w = inputs
        (first,) = super().__call__(inputs)
        if self.cuda.capturing is None:
            return [first, first.clone()]
        second = self.cuda.allocate(COUNT)
        pointers = [word(one.data_ptr()) for one in (x, y, w, second)]
        graph = self.cuda.capturing.graph
        chain = self.cuda.driver.graphs[graph].nodes[-1:]
        self.cuda.driver.add_node(graph, Node("KERNEL", self.body, pointers), after=chain)
        return [first, second]


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The alternative that wins each race of two launches that do not depend on each other."""
    faster = [BRANCHES]
    launches = [Launch(f"kernel {place}", place, writes=((8 * place, 8 * place + 8),)) for place in range(2)]
    monkeypatch.setattr(node, "log_of_capture", lambda *arguments: log_of(launches))
    monkeypatch.setattr(node, "noted", lambda log, model, *arguments: model)
    monkeypatch.setattr(node, "Race", lambda names: Race(names, faster[0]))
    monkeypatch.setattr(node, "mark", lambda device_index: object())
    return faster


def called(compiled: Compiled, w: torch.Tensor, calls: int) -> None:
    for step in range(calls):
        x, y = values(step), values(-3 * step)
        for result in compiled(x, y, w):
            assert torch.equal(result, 2 * x + y * w)


@pytest.mark.parametrize(("launches", "logs"), [(CHAINED, 1), (INDEPENDENT, 2)])
def test_function_with_a_long_path_is_noted_once(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, faster: list[str], launches: list[Launch], logs: int
) -> None:
    """It is recorded again for a parameter at another address."""
    made = mock.Mock(side_effect=lambda *arguments: log_of(launches))
    monkeypatch.setattr(node, "log_of_capture", made)
    compiled = Compiled(TwoKernels(cuda_on_cpu), outputs=2, concurrency="auto")
    kept = [values(start) for start in range(2)]
    for w in (kept[0], kept[0], kept[0], kept[1], kept[1]):
        called(compiled, w, 1)
    assert made.call_count == logs
    reasons = [one.concurrency.reason for one in compiled.reports if one.concurrency is not None]
    assert (launch_log.IS_NARROW in reasons) is (launches is CHAINED)


def test_disabled_option_keeps_the_chain_with_a_reason(cuda_on_cpu: CudaOnCpu, faster: list[str]) -> None:
    compiled = Compiled(TwoKernels(cuda_on_cpu), outputs=2)
    called(compiled, values(7), 10)
    (report,) = compiled.reports
    assert report.concurrency is not None
    assert (report.concurrency.decision, report.concurrency.reason) == ("chain", "the option concurrency is 'off'")


@pytest.mark.parametrize(
    ("failing", "winner", "decision"),
    [
        (None, BRANCHES, BRANCHES),
        (None, CHAIN, CHAIN),
        ("cuGraphGetNodes", BRANCHES, CHAIN),
        ("cuGraphGetEdges", BRANCHES, CHAIN),
        ("cuGraphRemoveDependencies", BRANCHES, CHAIN),
        ("cuGraphAddDependencies", CHAIN, BRANCHES),
    ],
)
def test_race_ends_with_inputs_in_place_in_a_correct_graph(
    cuda_on_cpu: CudaOnCpu,
    faster: list[str],
    failing: str | None,
    winner: str,
    decision: str,
) -> None:
    faster[0] = winner
    compiled, w = Compiled(TwoKernels(cuda_on_cpu), outputs=2, concurrency="auto"), values(7)
    called(compiled, w, 2)
    if failing is not None:
        cuda_on_cpu.driver.failing.add(failing)
    called(compiled, w, 60)
    (report,) = compiled.reports
    assert report.concurrency is not None
    assert report.concurrency.decision == decision
    if failing is None:
        assert (report.concurrency.width, report.concurrency.chain_us) == (2, 100.0)
        assert report.stage == "done" and all(one.indirect for one in report.inputs)
    else:
        assert "80.0 us" not in report.concurrency.reason
