"""The chain of a graph is raced against branches, whose edges are replaced, and the faster one is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpu.driver import Node
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import COUNT, Compiled, Model, values, word

from optimizations.concurrency.branches import BRANCHES, CHAIN, Branches
from optimizations.concurrency.edges import EdgesRefused, GraphEdges
from optimizations.concurrency.launch_log import LaunchLog, Logged
from optimizations.concurrency.order import Launch
from optimizations.graph.records import CapturedGraph, Edge, KernelNode
from optimizations.trees import node


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


def test_programmatic_edges_are_restored_with_their_ports() -> None:
    driver = Driver(3)
    driver.edges[100, 101] = SimpleNamespace(from_port=1, type=1)
    annotated = driver.edges[100, 101]
    edges = GraphEdges(driver, object(), [(0, 1), (0, 2)])
    edges.use(branched=True)
    assert driver.edges == {(100, 101): None, (100, 102): None}
    edges.use(branched=False)
    assert driver.edges[100, 101] is annotated


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


# The chain of a graph is raced against branches, and the faster one is kept.


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


@pytest.mark.parametrize("winner", [BRANCHES, CHAIN])
def test_inputs_are_read_in_place_after_the_race(
    cuda_on_cpu: CudaOnCpu,
    faster: list[str],
    winner: str,
) -> None:
    faster[0] = winner
    compiled, w = Compiled(TwoKernels(cuda_on_cpu), outputs=2, concurrency="auto"), values(7)
    called(compiled, w, 4)
    (during,) = compiled.reports
    assert during.concurrency is not None and during.concurrency.decision == "measuring"
    assert during.stage == "racing"
    called(compiled, w, 24)
    (report,) = compiled.reports
    assert report.concurrency is not None
    assert (report.concurrency.decision, report.concurrency.width) == (winner, 2)
    assert report.concurrency.chain_us == 100.0
    assert report.stage == "done"
    assert all(one.indirect for one in report.inputs)


def test_moved_parameter_ends_the_race(cuda_on_cpu: CudaOnCpu, faster: list[str]) -> None:
    compiled = Compiled(TwoKernels(cuda_on_cpu), outputs=2, concurrency="auto")
    for start in range(12):
        called(compiled, values(start), 1)
    called(compiled, values(1), 30)
    assert all(one.concurrency is not None for one in compiled.reports)


def test_disabled_option_keeps_the_chain_with_a_reason(cuda_on_cpu: CudaOnCpu, faster: list[str]) -> None:
    compiled = Compiled(TwoKernels(cuda_on_cpu), outputs=2)
    called(compiled, values(7), 10)
    (report,) = compiled.reports
    assert report.concurrency is not None
    assert (report.concurrency.decision, report.concurrency.reason) == ("chain", "the option concurrency is 'off'")


@pytest.mark.parametrize(
    ("call", "winner", "decision"),
    [
        ("cuGraphGetNodes", BRANCHES, CHAIN),
        ("cuGraphGetEdges", BRANCHES, CHAIN),
        ("cuGraphRemoveDependencies", BRANCHES, CHAIN),
        ("cuGraphAddDependencies", CHAIN, BRANCHES),
    ],
)
def test_driver_refusal_leaves_a_correct_graph(
    cuda_on_cpu: CudaOnCpu,
    faster: list[str],
    call: str,
    winner: str,
    decision: str,
) -> None:
    faster[0] = winner
    compiled, w = Compiled(TwoKernels(cuda_on_cpu), outputs=2, concurrency="auto"), values(7)
    called(compiled, w, 2)
    cuda_on_cpu.driver.failing.add(call)
    called(compiled, w, 60)
    (report,) = compiled.reports
    assert report.concurrency is not None
    assert report.concurrency.decision == decision
    assert "80.0 us" not in report.concurrency.reason
