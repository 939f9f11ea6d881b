"""The metric `floor`, with simulated graphs and device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.synthetic_results import cell as a_cell
from fixtures.synthetic_results import metrics as synthetic_metrics
from manual_clock import Clock

from suite.measure import launches
from suite.measure.launches import graphs_of
from suite.measure.metrics import PreparedCell, metrics
from suite.measure.metrics.floor import FEWEST, METRIC, MOST, MOST_LAUNCHES_WITH_ONE_WAIT
from suite.measure.modes import MODES
from suite.results.schema import Cell, Metrics


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Only launches and iterations take time."""
    return Clock(monkeypatch, launches)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Any:
    class Graph:
        launches = 0

        def replay(self) -> None:
            type(self).launches += 1
            clock.pass_us(500)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(launches, "least_graph", lambda: lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return Graph


def cell(iterate: Any, mode: str = "graph", device: str = "cuda") -> PreparedCell:
    return PreparedCell(iterate, SimpleNamespace(type=device), MODES[mode])  # type: ignore[arg-type]


def test_iteration_is_compared_with_its_graphs_alone(cuda: Any, clock: Clock) -> None:
    graph = cuda()

    def iterate(number: int) -> None:
        clock.pass_us(1000)
        graph.replay()

    assert METRIC.values(replace(cell(iterate), core=min(os.sched_getaffinity(0)))) == {
        "core": min(os.sched_getaffinity(0)),
        "graphs": 1,
        "floor_us": 500.0,
        "whole_us": 1500.0,
        "over_floor_ratio": 3.0,
    }


@pytest.mark.parametrize(
    ("iteration_us", "samples"), [(0, MOST), (499_500, FEWEST), (17_000, 20), (10_000_000, FEWEST)]
)
def test_inputs_move_as_in_timed_blocks(cuda: Any, clock: Clock, iteration_us: int, samples: int) -> None:
    graph, numbers = cuda(), []

    def iterate(number: int) -> None:
        numbers.append(number)
        clock.pass_us(iteration_us)
        graph.replay()

    METRIC.values(cell(iterate))
    assert numbers == list(range(2 + 2 * samples))


@pytest.mark.parametrize("has_graphs", [True, False])
def test_ranks_run_equally_many_iterations(cuda: Any, clock: Clock, has_graphs: bool) -> None:
    """Each iteration of a rank waits for the others: a rank with more iterations would wait forever."""
    slow = {"us": 17_500, "graphs": 1}
    counts = []
    for own in ({"us": 700, "graphs": int(has_graphs)}, slow):
        graph, numbers = cuda(), []
        said = iter([slow["graphs"], slow["us"]])

        def iterate(number: int, own: Any = own, numbers: Any = numbers, graph: Any = graph) -> None:
            numbers.append(number)
            clock.pass_us(own["us"] - 500 * own["graphs"])
            for _ in range(own["graphs"]):
                graph.replay()

        found = METRIC.values(replace(cell(iterate), largest=lambda value, said=said: max(value, next(said))))
        assert bool(found) is bool(own["graphs"])
        counts.append(len(numbers))
    assert counts == [2 + 2 * 20] * 2


def test_later_graphs_count_without_their_measured_wait(
    cuda: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host gets slower and slower, as for a neighbour's work: for the program's graphs and for the least one."""
    host_us = 0

    class Slowing(cuda):
        def replay(self) -> None:
            nonlocal host_us
            host_us += 100
            clock.pass_us(host_us + 500)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Slowing)
    graphs = [Slowing(), Slowing(), Slowing()]
    alone = [graph.replay for graph in graphs]

    def least() -> Callable[[], None]:
        return lambda: clock.pass_us(host_us)

    monkeypatch.setattr(launches, "least_graph", least)
    taken = graphs_of(lambda: [replay() for replay in alone], lambda: None, 5)
    assert taken == [], "what was bound before is not seen"
    host_us = 0

    def run() -> None:
        for graph in graphs:
            graph.replay()

    assert graphs_of(run, lambda: None, 1) == [(3, (600 + 700 + 800) - (100 + 200))]


def test_slower_host_for_empty_graphs_leaves_no_floor(cuda: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "least_graph", lambda: lambda: clock.pass_us(900))
    graph = cuda()
    found = METRIC.values(cell(lambda number: [graph.replay() for _ in range(4)]))
    assert found == {"core": None, "graphs": 4, "whole_us": 2000.0}


def a_row(launches: int, ranks: int = 1, **values: float) -> Cell:
    coverage = synthetic_metrics().coverage
    assert coverage is not None
    more: dict[str, dict[str, float | None]] = {
        METRIC.name: {"floor_us": 2.0, "whole_us": 4.0, "over_floor_ratio": 2.0, **values}
    }
    found = Metrics(coverage=coverage.model_copy(update={"graph_launches": launches}), more=more)
    return a_cell("EOS", "graph", metrics=found, tp=ranks)


@pytest.mark.parametrize(
    ("row", "ratio"),
    [
        (a_row(MOST_LAUNCHES_WITH_ONE_WAIT + 1), None),
        (a_row(MOST_LAUNCHES_WITH_ONE_WAIT), 2.0),
        (a_row(MOST_LAUNCHES_WITH_ONE_WAIT + 1, graphs=MOST_LAUNCHES_WITH_ONE_WAIT + 1), 2.0),
        (a_cell("EOS", "graph", metrics=None), None),
        (a_row(1, ranks=2), None),  # its ranks shared a core
        (a_row(1, ranks=2, core=4), 2.0),
    ],
)
def test_rows_with_one_wait_or_one_core_have_no_floor(row: Cell, ratio: float | None) -> None:
    assert METRIC in metrics()
    values = METRIC.of_row(row)
    assert values.get("over_floor_ratio") == ratio
    assert ratio or values in ({}, {"whole_us": 4.0})


@pytest.mark.parametrize(("mode", "device"), [("compile", "cuda"), ("graph", "cpu")])
def test_without_cuda_graphs_there_is_no_floor(cuda: Any, mode: str, device: str) -> None:
    assert METRIC.values(cell(lambda number: cuda().replay(), mode, device)) == {}
