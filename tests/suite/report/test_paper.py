"""The papers' figures and tables: every one, from results alone, with published values and missing ones marked."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures.fake_command import run_command
from fixtures.synthetic_results import block, cell, environment, failed_cell, metrics, write_run
from recorded_runs import joined

from models import registry
from suite.micro.records import read_micro_run
from suite.report.build import build_exhibits
from suite.report.chart import Chart, draw
from suite.report.grid import NOT_MEASURED
from suite.report.paper import EXHIBITS, Results, find_exhibits
from suite.report.paper.costs import read_programs
from suite.report.paper.exhibit import Made
from suite.report.paper.speedups import read_proof
from suite.report.provenance import Provenance
from suite.report.published import load_published
from suite.report.runs import Run, join_runs
from suite.results.errors import WrongUse
from suite.results.schema import Cell, CompileConditions, HostUse, Status
from suite.results.store import RECORDED

PUBLISHED = load_published()
ORIGIN = Provenance("SYNTHETIC GPU", "0.0")
MICRO = RECORDED / "micro-indirection" / "indirection.json.gz"
PROOF = min(RECORDED.glob("concurrency-*/*.jsonl.gz"))


def made(name: str, results: Results) -> Made:
    return EXHIBITS[name].make(results)


def results(*cells: Cell) -> Results:
    return Results(PUBLISHED, Run(environment(), cells))


def row(table: Made, label: str, column: str = "workload") -> dict[str, object]:
    (found,) = (dict(each) for each in table.table.frame.to_dict("records") if each[column] == label)
    return found


@pytest.fixture(scope="module")
def recorded() -> Results:
    return Results(PUBLISHED, joined(), read_micro_run(MICRO), proved=read_proof(PROOF))


@pytest.mark.parametrize("name", EXHIBITS)
def test_exhibit_of_recorded_runs_names_differences(name: str, recorded: Results) -> None:
    done = made(name, recorded)
    assert len(done.table.frame) > 0
    assert EXHIBITS[name].differs in done.table.note
    columns = " ".join(done.table.frame.columns)
    assert "published" in columns or "Published: " in done.table.note
    if done.chart is not None:
        assert draw(replace(done.chart, name="test"), done.provenance).axes
    tables = {"fig4b", "fig13", "graphs-enabled", "table1", "pygraph-table1", "pygraph-table4"}
    assert (done.chart is None) is (name in tables or name.startswith("nanogpt")), "Fig. 13: no cold time is recorded"
    assert done.points and all(point.quantity and point.measured for point in done.points)


def test_every_published_number_has_an_exhibit() -> None:
    """A value without a reader would be shown nowhere."""
    used: set[tuple[str, str]] = set()

    class Watched(dict[str, object]):
        def __init__(self, name: str, values: dict[str, object]) -> None:
            super().__init__(values)
            self.name = name

        def __getitem__(self, key: str) -> object:
            used.add((self.name, key))
            return super().__getitem__(key)

        def get(self, key: str, default: object = None) -> object:
            used.add((self.name, key))
            return super().get(key, default)

    watched = {
        field: {name: Watched(f"{field} {name}", dict(values)) for name, values in getattr(PUBLISHED, field).items()}
        for field in ("headline", "coverage_percent", "bytes_copied", "compile_s", "rewritten_program")
    }
    published = PUBLISHED.model_construct(**{**dict(PUBLISHED), **watched})
    for name in EXHIBITS:
        made(name, Results(published))
    lacking = {
        (of.name, key)
        for sources in watched.values()
        for of in sources.values()
        for key in of
        if (of.name, key) not in used
    }
    assert lacking == set()


@pytest.mark.parametrize("name", EXHIBITS)
def test_exhibit_without_results_marks_all_as_missing(name: str) -> None:
    done = made(name, Results(PUBLISHED))
    assert done.chart is None
    assert done.provenance.run_id == "run none"
    if name == "fig4":
        assert NOT_MEASURED in str(done.table.frame["workload"].iloc[0])
    elif "table1" in name and "nanogpt" not in name:
        assert "measured" not in done.table.frame
    else:
        body = done.table.frame["missing"].iloc[: len(done.table.frame) - done.table.summary_rows]
        assert all(NOT_MEASURED in str(reason) for reason in body)


def timed(name: str, **times_us: float) -> list[Cell]:
    return [cell(name, mode.replace("_", "-"), us) for mode, us in times_us.items()]


def compiled(mode: str, conditions: CompileConditions) -> Cell:
    plain = cell("EOS", mode)
    assert plain.compile is not None
    return plain.model_copy(update={"compile": plain.compile.model_copy(update={"conditions": conditions})})


def split(label: str, mode: str, microseconds: float) -> Cell:
    """A row of a workload over two GPUs."""
    whole = cell(label, mode, microseconds)
    assert whole.correctness is not None
    told = whole.correctness.model_copy(update={"ranks_equal": True})
    return whole.model_copy(update={"tp": 2, "correctness": told})


UNSEEN = metrics().model_copy(update={"kernels": None})
COVERED = [cell("ST", "placement", metrics=metrics(graph_kernels=3, eager_kernels=1, placeholder_bytes=0))]
FAILED = [
    *timed("DALLE2", compile=300, encore=100), cell("EOS", "compile", 100), failed_cell("EOS", "graph", Status.OOM),
    cell("EOS", "encore", 50, metrics=UNSEEN),
]  # fmt: skip
REWRITTEN = [
    cell("XLNET-I", "compile", 110), cell("XLNET-I", "compile", 100, variant="current"),
    cell("XLNET-I", "graph-unpartitioned", 300), cell("XLNET-I", "graph-unpartitioned", 100, variant="current"),
    cell("ST", "compile", 100),
]  # fmt: skip
MEMORY = [
    cell("EOS", "graph", metrics=metrics(reserved_bytes=1000)), cell("EOS", "graph-unpartitioned"),
    cell("EOS", "encore", metrics=metrics(reserved_bytes=900)),
]  # fmt: skip
CACHED = [
    compiled("graph-unpartitioned", CompileConditions.KERNELS_SIDE_BY_SIDE),
    compiled("placement", CompileConditions.KERNELS_ALONE), compiled("encore", CompileConditions.KERNELS_SIDE_BY_SIDE),
]  # fmt: skip
COLD = [compiled(mode, CompileConditions.COLD_ALONE) for mode in ("graph-unpartitioned", "encore")]
SPLIT = [*(split("XLNET-I@tp2", *of) for of in (("compile", 100), ("graph", 50))), cell("XLNET-I@tp1", "compile", 10)]
Expected = dict[str, Any]


@pytest.mark.parametrize(
    ("name", "cells", "label", "columns", "bars"),
    [
        (
            "fig10", timed("EOS", compile=100, graph_unpartitioned=125), "EOS",
            {"graph-unpartitioned_speedup": 0.8, "missing": "encore: not measured"},
            {
                "graph-unpartitioned": {"value": 0.8, "published": 0.71, "label": "0.80"},
                "encore": {"failure": NOT_MEASURED},
            },
        ),
        ("fig10", FAILED, "EOS", {"missing": "graph: oom"}, {"graph": {"failure": "oom"}}),
        ("fig10", FAILED, "EOS", {"missing": "encore: kernels not seen"}, {"encore": {"undecided": True}}),
        ("fig10", FAILED, "DALLE2", {}, {"encore": {"value": 3, "published": 2.72}}),  # the whole system
        (  # the gain of each step is relative to the previous one
            "fig11", timed("TKE", compile=100, graph_unpartitioned=80, placement=40, indirection=32), "TKE",
            {
                "placement_speedup": 2, "indirection_speedup": 1.25, "indirection_published_speedup": 1.23,
                "missing": "lean: not measured; selection: not measured",
            },
            {},
        ),
        (  # the rewritten program is the other variant
            "fig3", REWRITTEN, "XLNET-I",
            {
                "without_graphs_speedup": 1.1, "without_graphs_published_speedup": 1.18,
                "with_graphs_speedup": 3, "with_graphs_published_speedup": 3.17,
            },
            {},
        ),
        (
            "fig3", REWRITTEN, "ST",
            {"missing": "variant current not measured"}, {"rewritten, no graphs": {"failure": NOT_MEASURED}},
        ),
        (
            "table2", COVERED, "ST",
            {"graph-unpartitioned_published_percent": 5.14}, {"placement": {"value": 75, "published": 74.22}},
        ),
        ("table3", COVERED, "ST", {"placement_bytes": 0, "indirection_published_bytes": 336}, {}),
        ("table3", COVERED, "ST", {"published_graphs": 3}, {}),
        ("pygraph-table2", [cell("XLNET-I-8", "placement")], "XLNET-I-8", {"placement_published_percent": 100}, {}),
        ("memory", MEMORY, "EOS", {"replaying_ratio": 0.9}, {}),
        ("fig13", MEMORY, "EOS", {"encore_ratio": 1}, {}),
        ("fig13", MEMORY, "TEFD", {"whole_published_s": 506}, {}),
        (
            "fig13", CACHED, "EOS",
            {
                "placement_ratio": None, "placement_s": 6, "missing": "placement: other conditions",
                "encore_ratio": None, "encore_cached_ratio": 1, "conditions": "kernels cached, side by side",
            },
            None,  # the paper's caches were cold
        ),
        ("fig13", COLD, "EOS", {"encore_ratio": 1}, {"encore": {"value": 1}}),
        ("copy-share", timed("ST", placement=100, indirection=80), "ST", {"share_percent": 20}, {}),
        (  # next to compile on as many GPUs
            "fig12", SPLIT, "XLNET-I@tp2",
            {"ranks_equal": True, "tp": 2, "compile_us": 100}, {"graph": {"value": 2}},
        ),
    ],
)  # fmt: skip
def test_rows_and_bars_are_measured_next_to_published_values(
    name: str, cells: list[Cell], label: str, columns: Expected, bars: dict[str, Expected] | None
) -> None:
    done = made(name, results(*cells))
    found = row(done, label)
    for column, value in columns.items():
        assert value in found[column] if isinstance(value, str) else found[column] == pytest.approx(value), column
    assert (done.chart is None) is (bars is None)
    for series, expected in (bars or {}).items():
        assert isinstance(done.chart, Chart)
        bar = done.chart.bars[label, series]
        assert {field: getattr(bar, field) for field in expected} == pytest.approx(expected), series


def test_rewritten_program_is_compared_within_its_run() -> None:
    """The other rows of the workload are those of an older run, which had the host alone."""
    loud = HostUse(cpu_cores=3.5, gpus_at_work=1)
    alone = Run(environment(created_at="2026-01-01T00:00:00+00:00"), (cell("XLNET-I", "compile", 50),))
    pair = (cell("XLNET-I", "compile", 110, others=loud), cell("XLNET-I", "compile", 100, variant="current"))
    measured = Results(PUBLISHED, join_runs([Run(environment(created_at="2026-01-02T00:00:00+00:00"), pair), alone]))
    assert measured.passed("XLNET-I", "compile") == alone.cells[0]
    assert row(made("fig3", measured), "XLNET-I")["without_graphs_speedup"] == pytest.approx(1.1)


def test_exhibit_has_all_workloads_of_its_paper() -> None:
    done = made("fig10", results(*timed("EOS", compile=100, encore=50)))
    assert isinstance(done.chart, Chart)
    assert done.chart.groups[:25] == tuple(sorted(PUBLISHED.workloads["grace"])), "all of the paper's, one order"
    assert "NVIDIA H100 NVL" in done.table.note and "SYNTHETIC GPU" in done.table.note
    assert made("memory", results(*MEMORY)).points[1].measured == "0.90 times stock's, of 1"
    assert len(made("fig12", results(*SPLIT)).table.frame) == 5 * 3


@pytest.mark.parametrize("name", ["fig3", "fig12"])
def test_rows_whose_blocks_have_no_samples_are_not_measured(name: str) -> None:
    cells = [
        cell(workload, mode, variant=variant, blocks=[block(0, [])])
        for workload, variant in (("XLNET-I", "published"), ("XLNET-I", "current"), ("XLNET-I@tp1", "published"))
        for mode in ("compile", "graph", "graph-unpartitioned", "placement", "indirection", "encore")
    ]
    shown = made(name, results(*cells)).table.frame.to_csv()
    assert "not measured" in shown or "no latency samples" in shown


def test_share_of_copies_is_what_indirection_saves() -> None:
    slower = made("copy-share", results(cell("ST", "placement", 100), cell("ST", "indirection", 125)))
    assert row(slower, "ST")["share_percent"] == pytest.approx(-25)
    assert isinstance(slower.chart, Chart)
    bar = slower.chart.bars["ST", slower.chart.series[0]]
    assert (bar.value, bar.label) == (pytest.approx(-25), "-25.0")
    figure = draw(slower.chart, ORIGIN)
    (patch,) = [each for axis in figure.axes for each in axis.patches]
    assert patch.get_height() == pytest.approx(-25), "a negative value has a bar"


def test_memory_of_programs_is_read_by_phase(tmp_path: Path) -> None:
    path = tmp_path / "programs.jsonl"
    sizes = {1: (900, 300, 90, 80), 2: (200, 100, 100, 80), 3: (100, 90, 900, 80)}  # the second finds tuned kernels
    lines = [
        {"program": "p", "process": process, "mode": mode, "status": "ok", "device": "GPU",
         "recording": {"reserved_bytes": first}, "steady": {"reserved_bytes": second}}
        for process, of in sizes.items()
        for mode, first, second in (("stock", of[0], of[2]), ("encore", of[1], of[3]))
    ]  # fmt: skip
    lines.append({"program": "q", "mode": "encore", "status": "error"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = dict([read_programs(path)])
    assert read == {"GPU": {"compiling": [0.5], "replaying": [0.8]}}
    points = {point.quantity: point.measured for point in made("memory", Results(PUBLISHED, programs=read)).points}
    assert points["programs on GPU, replaying"] == "0.80 times stock's, of 1"
    path.write_text("{}\n")
    with pytest.raises(WrongUse, match="no rows of tests/gpu/programs"):
        read_programs(path)


def nanogpt_row(workload: str, mode: str, total_s: float, step_us: float, size: str = "full") -> Cell:
    """A row of a decode program: a generation of eight tokens in `total_s`."""
    row = cell(workload, mode, 1e6 * total_s, size=size)
    decode = {"tokens": 8.0, "tokens_per_s": 8 / total_s, "generation_us": 1e6 * total_s, "prompt_us": 9.0}
    assert row.metrics is not None
    more = {"decode": {**decode, "step_us": step_us, "fed_step_us": step_us}}
    return row.model_copy(update={"metrics": row.metrics.model_copy(update={"more": more})})


def nanogpt_rows(size: str = "full") -> list[Cell]:
    return [
        nanogpt_row(workload, mode, total_s, step_us, size)
        for workload in ("NANOGPT-4-8", "NANOGPT-8-8")
        for mode, total_s, step_us in (("eager", 1.0, 2000.0), ("by-hand", 0.8, 1000.0))
    ]


def test_nanogpt_rows_make_the_tables_of_the_article() -> None:
    given = results(*nanogpt_rows())
    steps, sweep = made("nanogpt-table1", given), made("nanogpt-table2", given)
    found = row(steps, "smoke test", "case")
    assert (found["eager_ms"], found["by-hand_ms"], found["by-hand_published_ms"]) == (2.0, 1.0, 0.903)
    assert found["by-hand_end_to_end_over_eager"].startswith("1.25") and found["end_to_end_published_speedup"] == 1.43
    assert isinstance(steps.chart, Chart) and steps.chart.bars["smoke test", "by-hand"].published == 0.903
    assert "not measured" in row(steps, "heavy prompt", "case")["missing"]
    (eight,) = (each for each in sweep.table.frame.to_dict("records") if each["generated"] == 8)
    assert (eight["by-hand_step_over_eager"], eight["step_published_speedup"]) == (2.0, 1.29)
    assert not any("over_graph" in column for column in sweep.table.frame), "it was no mode of that run"
    costs = row(made("nanogpt-costs", given), "by-hand", "mode")
    assert costs["missing"] == NOT_MEASURED, "the long generation was not run"
    smoke = made("nanogpt-table1", results(*nanogpt_rows("tiny"))).chart
    assert isinstance(smoke, Chart) and {bar.published for bar in smoke.bars.values()} == {None}


def test_workloads_are_the_papers_and_gaps_are_named() -> None:
    done = made("table1", results(cell("EOS", "compile")))
    known = registry.workloads()
    assert len(done.table.frame) == 25
    for found in done.table.frame.to_dict("records"):
        if found["workload"] in known:
            assert found["differs"] == "nothing listed", found
            assert found["batch"] == found["published_batch"] == known[str(found["workload"])].batch
        else:
            assert found["differs"] == "not in the suite"
    assert row(done, "EOS")["measured"] and not row(done, "ST")["measured"]


def test_selected_exhibits_are_written_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [cell("EOS", "compile"), cell("EOS", "graph", 50)])
    files, tables = build_exhibits(["table2", "fig10"], [run], tmp_path / "out")
    names = {path.relative_to(tmp_path / "out").as_posix() for path in files}
    # table2 has no figure, as none of its workloads was measured
    assert names == {"tables/paper_fig10.csv", "tables/paper_table2.csv", "figures/paper_fig10.png"}
    assert "### GraCE Fig. 10" in tables and "### GraCE Table 2" in tables
    with pytest.raises(WrongUse, match=r"did you mean .*fig1"):
        find_exhibits(["fig1O"])
    done = run_command(("report", str(run), "--out", str(tmp_path / "cli"), "--only", "fig13"))
    assert done.returncode == 0
    written = [line for line in done.stdout.splitlines() if line.endswith((".csv", ".png"))]
    assert all(Path(path).is_file() and "fig13" in path for path in written) and written
    files, _ = build_exhibits(["table1"], [tmp_path / "none"], tmp_path / "table1", micro=tmp_path / "none")
    assert [path.name for path in files] == ["paper_table1.csv"], "it reads no results"
    for names_given in ("fig99", ","):
        assert run_command(("report", str(run), "--only", names_given)).returncode == 2


@pytest.mark.parametrize(
    ("workload", "mode", "baseline", "speedup"),
    [
        ("EOS", "graph", "compile", 0.71),
        ("ST", "placement", "graph", 2.0),
        ("EOS", "encore", "compile", None),
        ("ALNET", "graph", "compile", None),
    ],
)
def test_speedups_are_next_to_the_same_comparison(
    workload: str, mode: str, baseline: str, speedup: float | None
) -> None:
    assert PUBLISHED.speedup("grace", workload, mode, baseline) == speedup


def proof_row(workload: str, **changes: object) -> dict[str, object]:
    row: dict[str, object] = {"phase": "measure", "workload": workload, "status": "ok"}
    return {**row, "recordings": [{}, {}], "run": {"device": "SYNTHETIC GPU"}, **changes}


def test_concurrency_shows_iterations_and_proved_graphs(tmp_path: Path) -> None:
    path = tmp_path / "proof.jsonl"
    times = {"decisions": [{"winner": "branches"}, {"winner": "chain"}], "bits": {"equal": True}}
    proved = [
        {"phase": "chain", "workload": "EOS", "status": "ok", "reserved_bytes": 100},
        {"phase": "branches", "workload": "EOS", "status": "ok", "reserved_bytes": 102},
        proof_row("EOS", times={"gain": 1.2}, **times),
        proof_row("MMC/current", times={"gain": 0.8}, **{**times, "bits": {"equal": False}}),
        proof_row("ST"),
        {"phase": "measure", "workload": "TKE", "status": "failed", "error": "out of memory"},
    ]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in proved))
    rows = [cell("EOS", "lean", 100), cell("EOS", "lanes", 80), cell("VM", "lanes", 80, variant="current")]
    done = made("concurrency", replace(results(*rows), proved=read_proof(path)))
    assert isinstance(done.chart, Chart)
    assert done.chart.bars["EOS", "lanes"].value == pytest.approx(1.25)
    assert done.chart.bars["EOS", "graphs alone"].value == pytest.approx(1.2)
    assert done.chart.bars["ST", "graphs alone"].failure == "each kernel needs the one before it"
    assert done.chart.bars["geomean", "graphs alone"].value == pytest.approx(math.sqrt(0.96))
    found = row(done, "EOS")
    assert [found[name] for name in ("graphs", "branched", "same_bits", "memory_ratio")] == [2, 1, True, 1.02]
    assert row(done, "MMC (current)")["graphs_alone_speedup"] == pytest.approx(0.8)
    assert "VM (current)" in set(done.table.frame["workload"])
    assert [point.measured for point in done.points][-2:] == ["1.10 of 2, SYNTHETIC GPU", "1 of 2"]
    assert draw(done.chart, done.provenance).axes


@pytest.mark.parametrize("text", ["{}", "no JSON", json.dumps(proof_row("EOS", recordings=None))])
def test_file_that_is_no_proof_is_wrong_use(tmp_path: Path, text: str) -> None:
    path = tmp_path / "proof.jsonl"
    path.write_text(text)
    with pytest.raises(WrongUse, match=r"no rows of tests/gpu/concurrency_proof\.py"):
        read_proof(path)
