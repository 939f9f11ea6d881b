"""Graphs are placed on a time line, and drawn as text and SVG; launches get times from a profile."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from optimizations.report.concurrency import ConcurrencyReport, OrderedLaunch
from optimizations.report.recordings import RecordingReport
from suite.cli.main import app
from suite.draw import measured, svg, text
from suite.draw.measured import GraphWork, times_of, with_times, work_of_graphs
from suite.draw.timeline import DrawnGraph, graphs_of, timeline

SPLIT = ((), (0,), (0,), (1, 2))
"""What each of four launches waits for: two branches between a first launch and a last one."""


def drawn(
    waits: tuple[tuple[int, ...], ...] = SPLIT,
    times_us: tuple[float, ...] | None = (1.0, 5.0, 2.0, 1.0),
    **launch: Any,
) -> DrawnGraph:
    order = tuple(
        OrderedLaunch(name=f"launch {index}", nodes=(f"triton_{index}",), waits_for=found, **launch)
        for index, found in enumerate(waits)
    )
    concurrency = ConcurrencyReport(decision="branches", reason="it is faster", order=order)
    return DrawnGraph(title="a graph", concurrency=concurrency, times_us=times_us)


@pytest.mark.parametrize(
    ("times_us", "starts", "path", "whole"),
    [
        ((1.0, 5.0, 2.0, 1.0), (0.0, 1.0, 1.0, 6.0), (0, 1, 3), (7.0, 9.0, "us")),
        ((1.0, 2.0, 5.0, 1.0), (0.0, 1.0, 1.0, 6.0), (0, 2, 3), (7.0, 9.0, "us")),
        (None, (0.0, 1.0, 1.0, 2.0), (0, 1, 3), (3.0, 4.0, "nodes")),
    ],
)
def test_timeline_has_starts_branches_and_the_longest_path(
    times_us: tuple[float, ...] | None,
    starts: tuple[float, ...],
    path: tuple[int, ...],
    whole: tuple[float, float, str],
) -> None:
    line = timeline(drawn(times_us=times_us))
    assert (line.starts, (line.end, line.total, line.unit), line.longest_path) == (starts, whole, path)
    assert (line.branches, len({line.branch_of[one] for one in path})) == (2, 1)
    (other,) = {1, 2} - {*path}
    assert line.branch_of[1] != line.branch_of[2] and line.crossings == ((0, other), (other, 3))


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 11)), st.floats(0, 9, allow_subnormal=False)), max_size=12).map(
        lambda rows: [(tuple(sorted(one for one in waits if one < at)), us) for at, (waits, us) in enumerate(rows)]
    )
)
def test_launches_of_a_branch_do_not_overlap(rows: list[tuple[tuple[int, ...], float]]) -> None:
    line = timeline(drawn(tuple(waits for waits, _ in rows), tuple(us for _, us in rows)))
    for one in range(len(rows)):
        assert all(line.ends[earlier] <= line.starts[one] for earlier in rows[one][0])
        for other in range(one):
            if line.branch_of[one] == line.branch_of[other]:
                assert line.ends[other] <= line.starts[one] or line.ends[one] <= line.starts[other]
    path = line.longest_path
    assert all(earlier in rows[later][0] for earlier, later in pairwise(path))
    assert sum(rows[one][1] for one in path) == pytest.approx(line.end)


def test_text_names_the_longest_path_by_kernel_and_line() -> None:
    graph = drawn(source_line="/home/me/model.py:12 in forward: y = self.a(x)")
    written = text.render(graph, timeline(graph))
    assert "branches: 2, crossings: 2, launches on the longest path: 3" in written
    assert "takes 7 of 9 us (78%)" in written
    path = written.partition("Longest path")[2]
    assert "launch 1" in path and "model.py:12 in forward" in path
    assert "launch 2" not in path
    assert "/home/me" not in written


def test_text_marks_barriers_and_gives_their_reasons() -> None:
    graph = drawn(barrier="it is a custom operator")
    written = text.render(graph, timeline(graph))
    assert "Barriers, 4: it is a custom operator" in written
    assert "|!!!" in written


def test_svg_names_launches_and_the_longest_path() -> None:
    graph = drawn(source_line='a<b>&"$c$".py:1 in <lambda>\x00')
    root = ElementTree.fromstring(svg.render(graph, timeline(graph)))
    texts = [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {f"launch {one}" for one in range(4)} <= set(texts), "in bars"
    path = [each for each in texts if each.rstrip().endswith('b>&"$c$".py:1 in <lambda>')]
    assert ["launch 0" in path[0], "launch 1" in path[1], "launch 3" in path[2], len(path)] == [True, True, True, 3]


@pytest.mark.filterwarnings("error:constrained_layout")
def test_svg_cuts_long_lines_of_the_longest_path() -> None:
    """Matplotlib would make the branches as much narrower, down to nothing."""
    graph = drawn(source_line=f"net.py:3 in forward: y = {'x + ' * 100}")
    root = ElementTree.fromstring(svg.render(graph, timeline(graph)))
    rows = [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}text") if "net.py" in (one.text or "")]
    assert len(rows) == 3 and all(row.endswith("…") and len(row) <= 200 for row in rows)


@pytest.mark.parametrize("times_us", [(), None])
def test_graph_without_an_order_gives_its_reason(times_us: tuple[float, ...] | None) -> None:
    concurrency = ConcurrencyReport(decision="chain", reason="the function has collectives")
    graph = DrawnGraph(title="a graph", concurrency=concurrency, times_us=times_us)
    assert "Nothing to draw: the function has collectives." in text.render(graph, timeline(graph))
    ElementTree.fromstring(svg.render(graph, timeline(graph)))


def recording(concurrency: ConcurrencyReport | None) -> RecordingReport:
    return RecordingReport("inference", 1, 1, (), 0, 0, (), None, concurrency=concurrency)


def test_reports_of_a_program_become_graphs() -> None:
    order = (OrderedLaunch("mm", ("gemm", "memset"), (), None, "model.py:3 in f"), OrderedLaunch("k", ("k",), (0,)))
    report = ConcurrencyReport("chain", "not faster", 2, 0, 2, 2, 9.0, 9.5, 0, order)
    found = graphs_of("mine", [recording(report), recording(None)])
    assert [one.title for one in found] == ["mine, graph 1 of 2 (inference)"]
    assert [asdict(one) for one in order] == [asdict(one) for one in found[0].concurrency.order]


@pytest.mark.parametrize(
    ("graphs", "files", "code"),
    [([drawn(), drawn(times_us=None)], ["a-1.svg", "a-2.svg"], 0), ([drawn()], ["a.svg"], 0), ([], [], 1)],
)
def test_command_draws_one_file_for_each_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: list[DrawnGraph], files: list[str], code: int
) -> None:
    """Nothing drawn is a finding."""
    monkeypatch.setattr(measured, "measured_graphs", lambda *arguments, **settings: graphs)
    ran = CliRunner().invoke(app, ["draw", "graph", "MMC", "--svg", str(tmp_path / "a.svg")])
    assert ran.exit_code == code, ran.output
    assert sorted(one.name for one in tmp_path.glob("*.svg")) == files
    assert ran.output.count("Longest path") == len(graphs)


def event(category: str, name: str, start: float, length: float, correlation: int) -> dict[str, Any]:
    arguments = {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": arguments}


def test_work_of_a_graph_is_listed_in_launch_order() -> None:
    events = [
        event("cuda_runtime", "cudaGraphLaunch", 0, 1, 7),
        event("cuda_runtime", "cudaLaunchKernel", 0, 1, 8),
        event("kernel", "triton_1", 20, 3, 7),
        event("kernel", "other", 10, 1, 8),
        event("gpu_memset", "Memset (Device)", 12, 2, 7),
        {"ph": "i", "name": "mark"},
    ]
    assert work_of_graphs({"traceEvents": events}) == [[("Memset (Device)", 2.0), ("triton_1", 3.0)]]


def work(names: list[str], scale: float = 1.0) -> GraphWork:
    return [(name, scale * number) for number, name in enumerate(names, start=1)]


def test_graph_gets_the_times_of_the_work_with_its_kernels() -> None:
    names = [f"triton_{one}" for one in range(4)]
    others = [work([*names[:3], "triton_x"]), work(names[:3]), work(names)]
    assert times_of([drawn()], others) == [(1.0, 2.0, 3.0, 4.0)]
    assert times_of([drawn(), drawn()], others) == [(1.0, 2.0, 3.0, 4.0), ()]


def test_launch_of_several_nodes_takes_their_sum() -> None:
    order = (
        OrderedLaunch(name="mm", nodes=("_ZN7cutlass", "memset"), waits_for=()),
        OrderedLaunch(name="k", nodes=("triton_k",), waits_for=()),
    )
    graph = DrawnGraph(title="", concurrency=ConcurrencyReport(decision="chain", reason="", order=order))
    assert times_of([graph], [work(["cutlass::Kernel", "Memset", "triton_k"])]) == [(3.0, 3.0)]


def test_times_are_medians_of_iterations_and_missing_ones_count() -> None:
    names = [f"triton_{one}" for one in range(4)]
    (found,) = with_times([drawn(times_us=None)], [[work(names, scale)] for scale in (1.0, 9.0, 2.0)])
    assert found.times_us == (2.0, 4.0, 6.0, 8.0)
    (found,) = with_times([drawn(times_us=None)], [[work(names)], []])
    assert found.times_us is None
