"""Cells are compared over common blocks, and missing comparisons are marked."""

from __future__ import annotations

import pytest
from fixtures.synthetic_results import block, cell, environment, failed_cell, metrics

from suite.report import compare
from suite.report.compare import Kernels
from suite.report.runs import Run
from suite.results import stats
from suite.results.schema import Grouping, Status


def run_of(*cells):
    return Run(environment(), cells)


def only(comparisons, mode, baseline):
    (item,) = [one for one in comparisons if (one.cell.mode, one.baseline) == (mode, baseline)]
    return item


def steady(times, processes=3, **changes):
    """Blocks with these medians in each process, without noise inside."""
    blocks = [
        block(i, [t, t, t], i).model_copy(update={"process": process})
        for process in range(processes)
        for i, t in enumerate(times)
    ]
    return {"blocks": blocks, "processes": processes, **changes}


def test_ratio_is_of_the_undisturbed_half_of_each_process():
    run = run_of(
        cell(mode="compile", **steady([100, 100, 100, 190, 200])), cell(mode="graph", **steady([50, 50, 50, 50, 95]))
    )
    item = only(compare.Ratios(run.cells), "graph", "compile")
    assert (item.ratio.value, item.ratio.low, item.ratio.processes) == (pytest.approx(2), pytest.approx(2, rel=0.4), 3)
    assert item.alternating
    assert item.verdict is stats.Verdict.FAST


def test_sequential_modes_do_not_show_how_processes_differ():
    """They are in no ratio of modes that alternated, and these are not known better because there are such modes."""

    def apart(mode, *times, **changes):
        blocks = [block(i, [t] * 3, i).model_copy(update={"process": p}) for p, t in enumerate(times) for i in range(5)]
        return cell(mode=mode, blocks=blocks, **changes)

    in_turn = [apart("compile", 100, 103, 98), apart("graph", 99, 101, 101), apart("placement", 101, 98, 100)]
    alone = [
        apart(mode, 90, 95, 100, grouping=Grouping.SEQUENTIAL) for mode in ("eager", "lean", "encore", "indirection")
    ]
    few, many = (compare.spread_of(cells) for cells in (in_turn, [*in_turn, *alone]))
    assert few == many and few.freedom == 4


def test_processes_are_compared_with_simultaneous_ones():
    """The second process of both was on a slower host; one that only one side has does not count."""
    slow = [block(i, [300.0], i).model_copy(update={"process": 1}) for i in range(6)]
    slower = [block(i, [600.0], i).model_copy(update={"process": 1}) for i in range(6)]
    alone = [block(i, [1.0], i).model_copy(update={"process": 2}) for i in range(6)]
    run = run_of(
        cell(mode="compile", blocks=[*steady([100] * 6, processes=1)["blocks"], *slower]),
        cell(mode="graph", blocks=[*steady([50] * 6, processes=1)["blocks"], *slow, *alone]),
    )
    item = only(compare.Ratios(run.cells), "graph", "compile")
    assert (item.ratio.value, item.ratio.processes) == (pytest.approx(2), 2)
    assert item.verdict is stats.Verdict.AMBG, "two processes do not decide"


@pytest.mark.parametrize("passed", [True, False])
def test_processes_that_agree_by_chance_do_not_decide(passed: bool):
    def in_three(*times):
        blocks = [block(i, [t] * 3, i).model_copy(update={"process": p}) for p, t in enumerate(times) for i in range(6)]
        return {"blocks": blocks, "processes": 3}

    wide = {"compile": (190.0, 200.0, 212.0), "graph-unpartitioned": (106.0, 100.0, 97.0), "lean": (94.0, 103.0, 100.0)}
    run = run_of(
        *(
            cell(mode=mode, **in_three(*times)) if passed else failed_cell("EOS", mode, Status.CRASH)
            for mode, times in wide.items()
        ),
        cell(mode="graph", **in_three(100.0, 103.0, 98.0)),
        cell(mode="placement", **in_three(96.0, 98.2, 94.4)),
        cell(mode="graph", workload="ALNET", **in_three(100.0, 103.0, 98.0)),
        cell(mode="placement", workload="ALNET", **in_three(96.0, 98.2, 94.4)),
    )
    placement = run.cells[4]
    item = compare.Ratios(run.cells).find("EOS", "placement", "graph")
    assert item is not None and item.ratio.value == pytest.approx(1.043, rel=1e-3)
    assert item.verdict is (stats.Verdict.AMBG if passed else stats.Verdict.FAST)
    alone = compare.Ratios(run.cells).find("ALNET", "placement", "graph")
    assert alone is not None and alone.verdict is stats.Verdict.FAST, "another workload's modes tell nothing of it"
    assert compare.Ratios(run.cells).against(placement, "graph").ratio == item.ratio


def test_paired_modes_use_the_baselines_blocks_of_their_pair():
    run = run_of(
        cell(mode="compile", grouping=Grouping.PAIRS, group=["compile", "eager"], **steady([900] * 6)),
        cell(
            mode="graph",
            grouping=Grouping.PAIRS,
            group=["compile", "graph"],
            baseline_blocks={"compile": steady([100] * 6)["blocks"]},
            **steady([50] * 6),
        ),
    )
    item = only(compare.Ratios(run.cells), "graph", "compile")
    assert item.ratio.value == pytest.approx(2)
    assert item.alternating


def test_modes_of_a_half_are_compared_over_blocks_of_that_half():
    first, second = ["compile", "graph", "graph-unpartitioned"], ["compile", "graph", "placement", "indirection"]
    of_second = {"compile": steady([100] * 6)["blocks"], "graph": steady([80] * 6)["blocks"]}
    run = run_of(
        cell(mode="compile", grouping=Grouping.HALVES, group=first, **steady([900] * 6)),
        cell(mode="graph", grouping=Grouping.HALVES, group=first, **steady([450] * 6)),
        cell(mode="graph-unpartitioned", grouping=Grouping.HALVES, group=first, **steady([300] * 6)),
        cell(mode="placement", grouping=Grouping.HALVES, group=second, baseline_blocks=of_second, **steady([50] * 6)),
        cell(mode="indirection", grouping=Grouping.HALVES, group=second, baseline_blocks=of_second, **steady([40] * 6)),
    )
    found = {
        (item.cell.mode, item.baseline): (item.ratio.value, item.alternating) for item in compare.Ratios(run.cells)
    }
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


def test_row_replaces_a_baseline_without_samples():
    run = run_of(
        cell(mode="compile", grouping=Grouping.HALVES, group=["compile", "eager"], **steady([100] * 6)),
        cell(
            mode="graph",
            grouping=Grouping.HALVES,
            group=["compile", "graph"],
            baseline_blocks={"compile": []},
            **steady([50] * 6),
        ),
    )
    item = only(compare.Ratios(run.cells), "graph", "compile")
    assert (item.ratio.value, item.alternating) == (pytest.approx(2), False)


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
    item = only(compare.Ratios(run_of(*cells).cells), "graph", "compile")
    assert (item.ratio, item.verdict, item.missing) == (None, None, missing)


def workloads_run(*, lacking: str | None = None):
    """A, B and C, where graph is 2, 4 and 8 times faster than compile, eager half as fast; `lacking` fails in graph."""
    cells = []
    for name, factor in (("A", 2), ("B", 4), ("C", 8)):
        cells += [
            cell(name, "eager", **steady([1600] * 6)),
            cell(name, "compile", **steady([800] * 6)),
            failed_cell(name, "graph", Status.OOM)
            if name == lacking
            else cell(name, "graph", **steady([800 / factor] * 6)),
        ]
    return run_of(*cells)


def shared(comparisons, *modes, labels="ABC"):
    means = comparisons.means(labels, [(mode, "compile") for mode in modes])
    return {mode: mean for (mode, _), mean in means.items()}


def test_geometric_means_count_their_workloads():
    found = shared(compare.Ratios(workloads_run().cells), "eager", "graph")
    assert found.keys() == {"eager", "graph"}
    assert found["graph"].value == pytest.approx(4)
    assert found["graph"].count == 3
    assert shared(compare.Ratios(workloads_run().cells), "graph", labels=["A"])["graph"].value == pytest.approx(2)


def test_means_go_over_the_rows_that_all_modes_have():
    """Means over different workloads cannot be set side by side."""
    found = shared(compare.Ratios(workloads_run(lacking="C").cells), "eager", "graph")
    assert {mode: mean.count for mode, mean in found.items()} == {"eager": 2, "graph": 2}
    assert found["graph"].value == pytest.approx(8**0.5)


def test_step_of_one_workload_does_not_narrow_the_means():
    cells = workloads_run(lacking="C").cells
    step = [cell(name, "step", **steady([100] * 6)) for name in "ABC"]

    def counts(*more):
        found = shared(compare.Ratios(run_of(*cells, *more).cells), "eager", "graph", "step")
        return {mode: mean.count for mode, mean in found.items()}

    assert counts(step[0]) == {"eager": 2, "graph": 2}
    assert counts(*step) == {"eager": 2, "graph": 2, "step": 2}, "it ran in all of them"
    assert counts(failed_cell("A", "step", Status.UNSUPPORTED), *step[1:]) == {"eager": 1, "graph": 1, "step": 1}


def with_kernels(*names, **changes):
    return {"metrics": metrics().model_copy(update={"kernels": dict.fromkeys(names, 1), **changes})}


@pytest.mark.parametrize(
    ("ours", "kernels", "verdict"),
    [
        (with_kernels("gemm 8 128"), Kernels.SAME, stats.Verdict.FAST),
        (with_kernels("gemm 8 128", "triton_poi 1 32"), Kernels.GENERATED, stats.Verdict.FAST),
        (with_kernels("gemm 8 256"), Kernels.RETUNED, None),
    ],
)
def test_ratio_of_other_kernels_has_no_verdict_and_no_mean(ours, kernels, verdict):
    run = run_of(
        cell(mode="compile", **steady([100] * 6), **with_kernels("gemm 8 128")),
        cell(mode="graph", **steady([50] * 6), **ours),
    )
    comparisons = compare.Ratios(run.cells)
    item = only(comparisons, "graph", "compile")
    assert (item.kernels, item.verdict) == (kernels, verdict)
    assert item.ratio.value == pytest.approx(2)
    assert bool(shared(comparisons, "graph", labels=["EOS"])) == (verdict is not None)


@pytest.mark.parametrize("side", ["compile", "graph"])
def test_processes_with_own_kernels_have_no_verdict(side):
    """A later process of one of the two may run different kernels after tuning."""
    modes = {"compile": steady([100] * 6), "graph": steady([50] * 6)}
    cells = [cell(mode=mode, **times, other_kernels=[1] * (mode == side)) for mode, times in modes.items()]
    item = only(compare.Ratios(run_of(*cells).cells), "graph", "compile")
    assert (item.kernels, item.verdict) == (Kernels.RETUNED, None)


def test_eager_runs_other_kernels_by_nature():
    run = run_of(cell(mode="eager", **steady([200] * 6), **with_kernels("other 1 1")), cell(mode="compile"))
    item = only(compare.Ratios(run.cells), "eager", "compile")
    assert (item.kernels, item.verdict) == (Kernels.EAGER, stats.Verdict.SLOW)
