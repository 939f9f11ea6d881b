"""Cells are compared over common blocks, missing comparisons are marked, and equal programs show false findings."""

from __future__ import annotations

import pytest
from fixtures.synthetic_results import block, cell, environment, failed_cell, in_processes, metrics, timed

from suite.report import compare
from suite.report.compare import Kernels, Ratios
from suite.report.runs import Run
from suite.report.speedup_tables import false_findings, same_program, same_program_pairs
from suite.results import stats
from suite.results.schema import Grouping, Status


def run_of(*cells):
    return Run(environment(), cells)


def only(comparisons, mode, baseline):
    (item,) = [one for one in comparisons if (one.cell.mode, one.baseline) == (mode, baseline)]
    return item


def test_ratio_is_of_the_undisturbed_half_of_each_process():
    def disturbed(*times):
        return {"blocks": in_processes([block(i, [time] * 3, i) for i, time in enumerate(times)]), "processes": 3}

    cells = (
        cell(mode="compile", **disturbed(100, 100, 100, 190, 200)), cell(mode="graph", **disturbed(50, 50, 50, 50, 95)),
    )  # fmt: skip
    item = only(Ratios(cells), "graph", "compile")
    assert (item.ratio.value, item.ratio.low, item.ratio.processes) == (pytest.approx(2), pytest.approx(2, rel=0.4), 3)
    assert item.alternating
    assert item.verdict is stats.Verdict.FAST


def test_sequential_modes_do_not_show_how_processes_differ():
    """They are in no ratio of modes that alternated, and these are not known better because there are such modes."""
    in_turn = [
        cell(mode=mode, **timed(*times))
        for mode, times in (("compile", (100, 103, 98)), ("graph", (99, 101, 101)), ("placement", (101, 98, 100)))
    ]
    alone = [
        cell(mode=mode, grouping=Grouping.SEQUENTIAL, **timed(90, 95, 100))
        for mode in ("eager", "lean", "encore", "indirection")
    ]
    few, many = (compare.spread_of(cells) for cells in (in_turn, [*in_turn, *alone]))
    assert few == many and few.freedom == 4


def test_processes_are_compared_with_simultaneous_ones():
    """The second process of both was on a slower host; one that only one side has does not count."""
    run = run_of(cell(mode="compile", **timed(100, 600)), cell(mode="graph", **timed(50, 300, 1)))
    item = only(Ratios(run.cells), "graph", "compile")
    assert (item.ratio.value, item.ratio.processes) == (pytest.approx(2), 2)
    assert item.verdict is stats.Verdict.AMBG, "two processes do not decide"


@pytest.mark.parametrize("passed", [True, False])
def test_processes_that_agree_by_chance_do_not_decide(passed: bool):
    wide = {"compile": (190.0, 200.0, 212.0), "graph-unpartitioned": (106.0, 100.0, 97.0), "lean": (94.0, 103.0, 100.0)}
    run = run_of(
        *(
            cell(mode=mode, **timed(*times)) if passed else failed_cell("EOS", mode, Status.CRASH)
            for mode, times in wide.items()
        ),
        *(
            cell(workload, mode, **timed(*times))
            for workload in ("EOS", "ALNET")
            for mode, times in (("graph", (100.0, 103.0, 98.0)), ("placement", (96.0, 98.2, 94.4)))
        ),
    )
    placement = run.cells[4]
    item = Ratios(run.cells).find("EOS", "placement", "graph")
    assert item is not None and item.ratio.value == pytest.approx(1.043, rel=1e-3)
    assert item.verdict is (stats.Verdict.AMBG if passed else stats.Verdict.FAST)
    alone = Ratios(run.cells).find("ALNET", "placement", "graph")
    assert alone is not None and alone.verdict is stats.Verdict.FAST, "another workload's modes tell nothing of it"
    assert Ratios(run.cells).against(placement, "graph").ratio == item.ratio


def grouped(mode, host_us, grouping, group, **baselines):
    """A row that was measured in this group, next to blocks of baselines with these times."""
    theirs = {name: timed(*times)["blocks"] for name, times in baselines.items()}
    return cell(mode=mode, grouping=grouping, group=group, baseline_blocks=theirs, **timed(*[host_us] * 3))


def test_modes_of_a_half_are_compared_over_blocks_of_that_half():
    first, second = ["compile", "graph", "graph-unpartitioned"], ["compile", "graph", "placement", "indirection"]
    of_second = {"compile": [100] * 3, "graph": [80] * 3}
    run = run_of(
        *(grouped(mode, us, Grouping.HALVES, first) for mode, us in zip(first, (900, 450, 300), strict=True)),
        *(grouped(m, us, Grouping.HALVES, second, **of_second) for m, us in (("placement", 50), ("indirection", 40))),
    )
    found = {(item.cell.mode, item.baseline): (item.ratio.value, item.alternating) for item in Ratios(run.cells)}
    assert found == {
        ("graph", "compile"): (pytest.approx(2), True),
        ("graph-unpartitioned", "compile"): (pytest.approx(3), True),
        ("graph-unpartitioned", "graph"): (pytest.approx(1.5), True),
        ("placement", "compile"): (pytest.approx(2), True),
        ("placement", "graph"): (pytest.approx(1.6), True),
        ("placement", "graph-unpartitioned"): (pytest.approx(6), False),
        ("indirection", "compile"): (pytest.approx(2.5), True),
        ("indirection", "graph"): (pytest.approx(2), True),
        ("indirection", "placement"): (pytest.approx(1.25), True),
    }


@pytest.mark.parametrize(
    ("cells", "missing"),
    [
        ([cell(mode="compile"), failed_cell("EOS", "graph", Status.OOM)], "oom"),
        ([failed_cell("EOS", "compile", Status.CRASH), cell(mode="graph")], "compile: crash"),
        ([cell(mode="graph")], "compile: not run"),
        ([cell(mode="compile", blocks=[]), cell(mode="graph")], "no samples"),
    ],
)
def test_without_two_good_cells_there_is_a_reason_and_no_ratio(cells, missing):
    item = only(Ratios(run_of(*cells).cells), "graph", "compile")
    assert (item.ratio, item.verdict, item.missing) == (None, None, missing)


def workloads_cells(*, lacking: str | None = None):
    """A, B and C, where graph is 2, 4 and 8 times faster than compile, eager half as fast; `lacking` fails in graph."""
    return [
        failed_cell(name, mode, Status.OOM)
        if (name, mode) == (lacking, "graph")
        else cell(name, mode, **timed(*[us] * 3))
        for name, factor in (("A", 2), ("B", 4), ("C", 8))
        for mode, us in (("eager", 1600), ("compile", 800), ("graph", 800 / factor))
    ]


def shared(cells, *modes, labels="ABC"):
    means = Ratios(tuple(cells)).means(labels, [(mode, "compile") for mode in modes])
    return {mode: mean for (mode, _), mean in means.items()}


def test_means_go_over_the_rows_that_all_modes_have():
    """Means over different workloads cannot be set side by side; a step of one workload does not narrow them."""
    cells = workloads_cells(lacking="C")
    found = shared(cells, "eager", "graph")
    assert {mode: mean.count for mode, mean in found.items()} == {"eager": 2, "graph": 2}
    assert found["graph"].value == pytest.approx(8**0.5)
    step = [cell(name, "step", **timed(*[100] * 3)) for name in "ABC"]

    def counts(*more):
        return {mode: mean.count for mode, mean in shared([*cells, *more], "eager", "graph", "step").items()}

    assert counts(step[0]) == {"eager": 2, "graph": 2}
    assert counts(*step) == {"eager": 2, "graph": 2, "step": 2}, "it ran in all of them"
    assert counts(failed_cell("A", "step", Status.UNSUPPORTED), *step[1:]) == {"eager": 1, "graph": 1, "step": 1}


def with_kernels(*names):
    return {"metrics": metrics().model_copy(update={"kernels": dict.fromkeys(names, 1)})}


@pytest.mark.parametrize(
    ("mode", "ours", "kernels", "verdict"),
    [
        ("graph", with_kernels("gemm 8 128"), Kernels.SAME, stats.Verdict.FAST),
        ("graph", with_kernels("gemm 8 128", "triton_poi 1 32"), Kernels.GENERATED, stats.Verdict.FAST),
        ("graph", with_kernels("gemm 8 256"), Kernels.RETUNED, None),
        ("eager", with_kernels("other 1 1"), Kernels.EAGER, stats.Verdict.FAST),
    ],
)
def test_ratio_of_other_kernels_has_no_verdict_and_no_mean(mode, ours, kernels, verdict):
    """Eager runs others by nature."""
    cells = (
        cell(mode="compile", **timed(*[100] * 3), **with_kernels("gemm 8 128")),
        cell(mode=mode, **timed(*[50] * 3), **ours),
    )
    item = only(Ratios(cells), mode, "compile")
    assert (item.kernels, item.verdict, item.ratio.value) == (kernels, verdict, pytest.approx(2))
    assert bool(shared(cells, mode, labels=["EOS"])) == (verdict is not None)


@pytest.mark.parametrize("side", ["compile", "graph"])
def test_processes_with_own_kernels_have_no_verdict(side):
    """A later process of one of the two may run different kernels after tuning."""
    modes = {"compile": timed(*[100] * 3), "graph": timed(*[50] * 3)}
    cells = [cell(mode=mode, **times, other_kernels=[1] * (mode == side)) for mode, times in modes.items()]
    item = only(Ratios(run_of(*cells).cells), "graph", "compile")
    assert (item.kernels, item.verdict) == (Kernels.RETUNED, None)


def test_verdict_between_equal_programs_is_a_false_finding():
    cells = [
        cell(workload, mode, **timed(*[us] * 3))
        for workload, placement in (("A", 100), ("B", 80))
        for mode, us in (("graph", 100), ("placement", placement))
    ]
    pairs = same_program_pairs(Ratios(tuple(cells)))
    assert [(pair.cell.workload, pair.baseline) for pair in pairs] == [("A", "graph"), ("B", "graph")]
    assert {pair.cell.workload for pair in false_findings(pairs)} == {"B"}
    assert "1 of 2 verdicts (50.0 %)" in same_program(Ratios(tuple(cells))).note


@pytest.mark.parametrize(
    "cells",
    [
        *(
            (cell("A", "graph"), cell("A", "placement", metrics=other))
            for other in (
                metrics(graph_kernels=80),
                metrics(placeholder_bytes=0),
                metrics().model_copy(update={"kernels": {"gemm 4x1x1 128x1x1": 1}}),
                metrics().model_copy(update={"coverage": None}),
                None,
            )
        ),
        (cell("A", "graph"), failed_cell("A", "placement", Status.OOM)),
        tuple(cell("A", mode) for mode in ("compile", "graph", "graph-unpartitioned", "indirection")),
    ],
)
def test_other_launches_or_undeclared_modes_are_not_one_program(cells):
    ratios = Ratios(cells)
    assert same_program_pairs(ratios) == []
    table = same_program(ratios)
    assert len(table.frame) == 0 and "0 of 0 verdicts on modes" in table.note
