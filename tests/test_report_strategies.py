"""Ways to capture side by side: numbers worked out by hand, what was refused, and runs that have nothing of it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from fixtures.report_pages import few_exhibits, undrawn  # noqa: F401  # fixtures are used by their names
from fixtures.synthetic_results import cell, environment, failed_cell, metrics, write_run

from suite.report import compare
from suite.report.build import build_report
from suite.report.cell_tables import coverage
from suite.report.load import Run
from suite.report.published import load_published
from suite.report.strategies import strategies
from suite.report.table import Table
from suite.schema import Cell, Metrics, Status


def graphs(recorded: int, launches: int, reserved_bytes: int) -> Metrics:
    found = metrics(reserved_bytes=reserved_bytes)
    assert found.coverage is not None and found.graphs is not None
    return found.model_copy(
        update={
            "coverage": found.coverage.model_copy(update={"graph_launches": launches}),
            "graphs": found.graphs.model_copy(update={"cuda_graphs": recorded}),
        }
    )


def trained(mode: str, host_us: float, recorded: int, launches: int, reserved_bytes: int) -> Cell:
    return cell("DCGAN", mode, host_us, metrics=graphs(recorded, launches, reserved_bytes), with_optimizer=True)


SIDE_BY_SIDE = (
    trained("eager", 200.0, 0, 0, 1000),
    trained("compile", 100.0, 0, 0, 900),
    trained("graph", 50.0, 3, 2, 1100),
    trained("encore", 40.0, 3, 3, 1200),
    trained("step", 20.0, 0, 1, 1500),
    trained("callables", 25.0, 0, 2, 3000),
)


def made(*cells: Cell) -> Table | None:
    run = Run(environment(), cells)
    return strategies(run, compare.compare(run))


def rows(*cells: Cell) -> dict[tuple[str, str], dict[str, object]]:
    """The table's rows by workload and mode."""
    table = made(*cells)
    assert table is not None
    return {(row["workload"], row["mode"]): row for row in table.frame.to_dict("records")}


def test_modes_stand_side_by_side_those_that_capture_least_first() -> None:
    found = rows(*SIDE_BY_SIDE)
    assert [mode for _, mode in found] == ["compile", "graph", "encore", "callables", "step"]
    assert [row["captured"] for row in found.values()] == [
        "no graph",
        "each torch.compile graph",
        "each torch.compile graph",
        "forward and backward",
        "whole iteration",
    ]
    assert {label for label, _ in found} == {"DCGAN (with optimizer)"}


def test_rows_have_graphs_times_ratios_and_memory() -> None:
    found = list(rows(*SIDE_BY_SIDE).values())
    assert [row["host_us"] for row in found] == [100.0, 50.0, 40.0, 25.0, 20.0]
    assert [row["cuda_graphs"] for row in found] == [0, 3, 3, 2, 1], "older rows count no graphs of callables and steps"
    assert [row["graph_launches"] for row in found] == [0, 2, 3, 2, 1]
    assert {row["coverage_percent"] for row in found} == {75.0}
    assert [row["replay_peak_reserved_bytes"] for row in found] == [900, 1100, 1200, 3000, 1500]
    assert [row["reserved_over_eager_ratio"] for row in found] == [0.9, 1.1, 1.2, 3.0, 1.5]
    assert [row["refused"] for row in found] == [None] * 5
    assert found[0]["over_compile"] is None
    ratios = [str(row["over_compile"]) for row in found[1:]]
    assert [text.partition(" ")[0] for text in ratios] == ["2.00", "2.50", "4.00", "5.00"]
    assert all(text.endswith("] FAST") for text in ratios)


def test_coverage_counts_the_same_graphs() -> None:
    newer = trained("callables", 25.0, recorded=4, launches=2, reserved_bytes=3000)
    for cells in (SIDE_BY_SIDE, (*SIDE_BY_SIDE[:-1], newer)):
        side_by_side = {mode: row["cuda_graphs"] for (_, mode), row in rows(*cells).items()}
        table = coverage(Run(environment(), cells), load_published())
        found = {row["mode"]: row["cuda_graphs"] for row in table.frame.to_dict("records")}
        assert found == {"eager": 0} | side_by_side
        assert (found["step"], found["callables"]) == (1, 4 if newer in cells else 2)


@pytest.mark.parametrize(
    ("error", "shown"), [("check: Unsupported: a loop\nthe rest", "check: Unsupported: a loop"), ("", "no error given")]
)
def test_what_was_refused_has_the_first_line_of_its_error_and_no_numbers(error: str, shown: str) -> None:
    refused = failed_cell("EOS", "step", Status.UNSUPPORTED, error)
    found = rows(cell("EOS", "eager"), cell("EOS", "compile"), refused)
    row = found["EOS", "step"]
    assert (row.pop("refused"), row.pop("over_compile"), row.pop("captured")) == (
        shown,
        "unsupported",
        "whole iteration",
    )
    assert [name for name, value in row.items() if value is not None] == ["workload", "mode", "status"]
    assert found["EOS", "compile"]["refused"] is None


def test_without_a_baseline_or_eager_the_rest_stands() -> None:
    alone = rows(cell("EOS", "step", 20.0))["EOS", "step"]
    assert (alone["over_compile"], alone["host_us"], alone["reserved_over_eager_ratio"]) == (
        "compile: not run",
        20.0,
        None,
    )
    failed = [failed_cell("EOS", mode, Status.OOM, "no memory") for mode in ("eager", "compile")]
    found = rows(*failed, cell("EOS", "step", 20.0, metrics=None))
    assert (found["EOS", "compile"]["over_compile"], found["EOS", "compile"]["refused"]) == (None, "no memory")
    step = found["EOS", "step"]
    assert (step["over_compile"], step["cuda_graphs"], step["replay_peak_reserved_bytes"]) == (
        "compile: oom",
        None,
        None,
    )


def test_workloads_and_runs_that_captured_no_more_are_left_out() -> None:
    assert set(rows(cell("EOS", "graph"), cell("ST", "graph"), cell("ST", "callables"))) == {
        ("ST", "graph"),
        ("ST", "callables"),
    }
    assert made(cell("EOS", "compile"), cell("EOS", "graph")) is None


@pytest.mark.usefixtures("undrawn")
def test_strategies_are_in_page_and_folder_if_measured(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = build_report([write_run(tmp_path / "run", SIDE_BY_SIDE)], None, out)
    assert 'id="strategies"' in report.html.read_text()
    with (out / "tables" / "strategies.csv").open() as file:
        found = {row["mode"]: row for row in csv.DictReader(file)}
    assert (found["step"]["over_compile_verdict"], found["step"]["cuda_graphs"]) == ("FAST", "1")
    report = build_report([write_run(tmp_path / "run", SIDE_BY_SIDE[:4])], None, out)
    assert 'id="strategies"' not in report.html.read_text()
    assert not list((out / "tables").glob("strategies.*"))
