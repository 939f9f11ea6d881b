"""Numbers in the tables, worked out by hand; failed cells keep their rows; units are those of the column's name."""

from __future__ import annotations

import pytest
from fixtures.synthetic_results import block, cell, environment, failed_cell, in_processes

from optimizations.byte_units import format_bytes, parse_bytes
from suite.report import cell_tables, compare, provenance, runs, speedup_tables
from suite.report.page import sort_key
from suite.report.published import load_published
from suite.report.runs import Run
from suite.report.table import make_table, to_markdown
from suite.report.units import NOTHING, format_heading, format_value
from suite.results.schema import Cell, HostUse, Status

PUBLISHED = load_published()


def rows(table, **wanted):
    """The table's rows as dicts, those that have these values."""
    found = table.frame.to_dict("records")
    return [row for row in found if all(row[column] == value for column, value in wanted.items())]


def row(table, **wanted):
    (only,) = rows(table, **wanted)
    return only


@pytest.fixture
def run():
    """EOS in three modes, graph twice as fast as compile; ST whose graph cell ran out of memory."""
    return Run(
        environment(),
        (
            cell("EOS", "eager", 200.0),
            cell("EOS", "compile", 100.0),
            cell("EOS", "graph", 50.0, blocks=in_processes([block(i, [50, 50.5, 49.5], i) for i in range(6)])),
            cell("ST", "compile", 300.0),
            failed_cell("ST", "graph", Status.OOM, "CUDA out of memory | tried 2 GB"),
        ),
        missing=(("ST", "eager"),),
    )


@pytest.fixture
def comparisons(run):
    return compare.Ratios(run.cells)


def table_of(name, run):
    return next(each for each in cell_tables.all_tables(run) if each.name == name)


def test_overview_has_time_ratio_interval_verdict_and_reasons(run, comparisons):
    table = speedup_tables.overview(comparisons, PUBLISHED)
    eos, st = row(table, workload="EOS"), row(table, workload="ST")
    assert eos["compile_us"] == 100.0
    assert eos["graph"].startswith("2.00 [") and eos["graph"].endswith("] FAST")
    assert eos["eager"].startswith("0.50 [") and eos["eager"].endswith("] SLOW")
    assert (st["compile_us"], st["graph"], st["eager"]) == (300.0, "oom", "not run")
    mean = row(table, workload="geomean: GraCE's 25 workloads")["graph"]
    assert mean.startswith("2.00 [") and mean.endswith("] of 1")
    assert table.summary_rows == 1


def test_overview_over_graph_has_the_modes_compared_with_it() -> None:
    cells = [cell("EOS", mode, time) for mode, time in (("compile", 100), ("graph", 50), ("placement", 25))]
    run = Run(environment(), tuple(cells))
    table = speedup_tables.overview(compare.Ratios(run.cells), PUBLISHED, "graph")
    assert (table.name, list(table.frame.columns)) == ("over_graphs", ["workload", "graph_us", "placement"])
    assert row(table, workload="EOS")["placement"].startswith("2.00 [")
    without = Run(environment(), tuple(cells[:1]))
    assert len(speedup_tables.overview(compare.Ratios(without.cells), PUBLISHED, "graph").frame) == 0


def test_times_split_host_time_into_kernel_time_and_the_rest(run):
    found = row(table_of("times", run), workload="EOS", mode="compile")
    # three times six blocks of 100, 101, 99; device one less; kernels 40
    assert (found["host_us"], found["device_us"]) == (100.0, 99.0)
    assert (found["kernel_us"], found["rest_us"], found["host_to_kernel_ratio"]) == (40.0, 60.0, 2.5)
    assert (found["host_p05_us"], found["host_p95_us"]) == (99.0, 101.0)
    assert (found["samples"], found["blocks"], found["processes"], found["grouping"]) == (54, 18, 3, "together")


def test_headline_has_means_and_counts_of_verdicts() -> None:
    compiled = cell("ST", "encore").compile
    assert compiled is not None
    unsettled = compiled.model_copy(update={"settled": False})
    cells = (
        *(cell("EOS", mode, time) for mode, time in (("compile", 100), ("graph", 50), ("encore", 25))),
        *(cell("ST", mode, time) for mode, time in (("compile", 100), ("graph", 50))),
        cell("ST", "encore", 10, compile=unsettled),
        *(cell("MINE", mode, time) for mode, time in (("compile", 100), ("graph", 90), ("encore", 10))),
    )
    run = Run(environment(), cells)
    comparisons = compare.Ratios(run.cells)
    table = speedup_tables.headline(comparisons, PUBLISHED)
    assert list(table.frame["workload"]) == ["EOS", "ST", "geometric mean", "verdicts"], "GraCE's workloads alone"
    assert row(table, workload="ST")["over_graph"].endswith("] unsettled")
    mean = row(table, workload="geometric mean")["over_graph"]
    assert mean.startswith("2.0") and mean.endswith(" of 1")
    assert row(table, workload="verdicts")["over_graph"] == "1 FAST, 1 none"


def test_other_programs_on_the_host_are_named():
    loud = HostUse(cpu_cores=3.5, gpus_at_work=1)
    cells = (cell("BERT", "compile", others=loud), cell("BERT", "graph"), cell("DBV2", "compile"))
    (note,) = runs.load_notes(Run(environment(), cells))
    assert note.startswith("1 workloads were measured while other programs kept a core or another GPU of the host busy")
    assert list(runs.load_notes(Run(environment(), cells[1:]))) == []


def test_simultaneous_workloads_are_named():
    def one(label: str, minute: int) -> Cell:
        return cell(label, "graph", started_at=f"2026-01-01T00:{minute:02d}:00+00:00", wall_s=61.0)

    cells = (one("BERT", 1), one("DBV2", 1), one("EOS", 2), one("LP", 5))
    whole = environment(command_line=["encore", "merge", "one", "two"])
    assert runs.at_the_same_time(Run(whole, cells)) == ("BERT", "DBV2"), "one second more is rounding"
    (note,) = runs.load_notes(Run(whole, cells))
    assert note.startswith("2 workloads were measured at the same time as others")
    assert runs.at_the_same_time(Run(environment(), cells)) == (), "one run measures one workload after another"
    assert list(runs.load_notes(Run(whole, cells[1:]))) == []
    shards = tuple(Run(environment(), (each,)) for each in cells)
    assert runs.at_the_same_time(Run(environment(), cells, parts=shards)) == ("BERT", "DBV2")


def test_failed_and_missing_cells_are_listed_with_their_error(run):
    assert rows(table_of("failed", run)) == [
        {"workload": "ST", "mode": "graph", "status": "oom", "error": "CUDA out of memory | tried 2 GB"},
        {"workload": "ST", "mode": "eager", "status": "not run", "error": None},
    ]


def test_markdown_escapes_what_would_break_a_table_or_be_html():
    table = make_table("t", "A <b>", "", [{"workload": "a|b\n<script>", "host_us": None}])
    run = Run(environment(), (cell(),))
    lines = to_markdown(table, provenance.of_run(run)).splitlines()
    assert lines[0] == "### A &lt;b>"
    assert lines[-1] == "| a\\|b &lt;script> | \N{EN DASH} |"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (16, "16 B"), (1023, "1023 B"), (8192, "8.0 KB"), (602112, "588.0 KB"), (3243229184, "3.0 GB")],
)
def test_bytes_are_printed_as_the_papers_print_them(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize("text", ["8.0", "8 kB", "KB", "8 MiB"])
def test_invalid_byte_count_is_refused(text):
    with pytest.raises(ValueError, match=r"byte count|float"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("host_us", 1234.6, "1,235"),
        ("host_us", 12.34567, "12.35"),
        ("kernels", 12345, "12,345"),
        ("copied_bytes", 2048, "2.0 KB"),
        ("coverage_percent", 5.138, "5.14"),
        ("grace_speedup", 1.9, "1.900"),
        ("high", float("inf"), "∞"),
        ("passed", True, "yes"),
        ("blocking", False, "no"),
        ("placeholder_bytes", 0, "0 B"),
        ("placeholder_bytes", None, NOTHING),
        ("host_us", float("nan"), NOTHING),
    ],
)
def test_values_are_printed_by_the_unit_in_the_columns_name(column, value, text):
    assert format_value(column, value) == text


@pytest.mark.parametrize(
    ("column", "heading"),
    [
        ("host_us", "host (µs)"),
        ("eager_published_ms", "eager published (ms)"),
        ("coverage_percent", "coverage (%)"),
        ("cuda_graphs", "CUDA graphs"),
        ("workload", "workload"),
        ("clock_low_mhz", "clock low (MHz)"),
    ],
)
def test_headings_show_the_unit(column, heading):
    assert format_heading(column) == heading


@pytest.mark.parametrize(
    ("value", "key"),
    [(3, "3"), ("1.25 [1.20, 1.30] FAST", "1.25"), ("1,234 of 2", "1234"), ("oom", None), (None, None), (True, None)],
)
def test_cells_sort_by_the_number_they_begin_with(value, key):
    assert sort_key(value) == key
