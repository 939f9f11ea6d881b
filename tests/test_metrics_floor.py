"""The metric `floor`, with graphs and a device that are not there."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from suite.metrics import PreparedCell, metrics
from suite.metrics.floor import METRIC, replayed
from suite.modes import MODES


class Graph:
    launches = 0

    def replay(self) -> None:
        type(self).launches += 1
        time.sleep(0.0005)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
    kind = type("BoundGraph", (Graph,), {})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kind)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return kind


def cell(iterate: Any, mode: str = "graph", device: str = "cuda") -> PreparedCell:
    return PreparedCell(iterate, SimpleNamespace(type=device), MODES[mode])  # type: ignore[arg-type]


def test_an_iteration_is_compared_with_its_graphs_alone(cuda: Any) -> None:
    graphs = [cuda(), cuda()]

    def iterate(number: int) -> None:
        time.sleep(0.001)
        for graph in graphs:
            graph.replay()

    values = METRIC.values(cell(iterate))
    assert 900 < values["floor_us"] < values["whole_us"]  # type: ignore[operator]
    assert values["over_floor_ratio"] == pytest.approx(values["whole_us"] / values["floor_us"])  # type: ignore[operator]
    assert 1.3 < values["over_floor_ratio"] < 3  # type: ignore[operator]


@pytest.mark.parametrize(("mode", "device"), [("compile", "cuda"), ("graph", "cpu")])
def test_without_cuda_graphs_there_is_no_floor(cuda: Any, mode: str, device: str) -> None:
    assert METRIC.values(cell(lambda number: cuda().replay(), mode, device)) == {}


def test_an_iteration_that_launches_no_graph_has_no_floor(cuda: Any) -> None:
    assert METRIC.values(cell(lambda number: None)) == {}


def test_what_is_launched_is_noted_in_order_and_nothing_afterwards(cuda: Any) -> None:
    first, second = cuda(), cuda()
    with pytest.raises(ZeroDivisionError), replayed(cuda) as found:
        for graph in (first, second, first):
            graph.replay()
        raise ZeroDivisionError
    assert found == [first, second, first]
    assert cuda.launches == 3
    first.replay()
    assert len(found) == 3


def test_the_suite_finds_it() -> None:
    assert METRIC in metrics()
