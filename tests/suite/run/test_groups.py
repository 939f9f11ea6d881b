"""Modes that do not fit on the GPU together: measured in halves, in pairs with their baseline, or one after another."""

from __future__ import annotations

import pytest
from fixtures.bench import FOUR, Bench, bench, interrupted_once_it_hangs

from suite.measure.modes import select_modes
from suite.results.schema import Grouping, Status
from suite.results.store import read_run

__all__ = ["bench"]


TWO_HALVES = select_modes(["eager", "compile", "graph", "graph-unpartitioned", "placement", "indirection"])
"""Modes that are two halves of four, with the common baselines in both."""


def test_modes_that_do_not_fit_are_measured_in_halves(bench: Bench) -> None:
    bench.run(fits=4, modes=TWO_HALVES)
    cells = bench.cells()
    assert list(cells) == [mode.name for mode in TWO_HALVES], "one row per mode, in the order of the modes"
    assert {(cell.status, cell.grouping) for cell in cells.values()} == {(Status.PASS, Grouping.HALVES)}
    first = ["compile", "graph", "eager", "graph-unpartitioned"]
    second = ["compile", "graph", "placement", "indirection"]
    for mode in first:
        assert (cells[mode].group, cells[mode].baseline_blocks) == (first, {})
    for mode in second[2:]:
        assert cells[mode].group == second
        assert list(cells[mode].baseline_blocks) == ["compile", "graph"]
        assert [len(block.host_us) for block in cells[mode].baseline_blocks["graph"]] == [6] * 5
    alternated = [*cells["placement"].baseline_blocks.values(), cells["placement"].blocks, cells["indirection"].blocks]
    assert sorted(block.turn for blocks in alternated for block in blocks) == list(range(20))
    measured = bench.measured()
    for half, part in ((first, measured[:20]), (second, measured[20:])):
        assert [turn for _, _, turn in part] == list(range(20)), "two groups and no pair"
        assert {mode for mode, _, _ in part} == set(half)
    assert all(cell.metrics is not None for cell in cells.values())


@pytest.mark.parametrize(
    ("too_large", "fitting"),
    [("indirection", ["eager", "graph-unpartitioned"]), ("eager", ["placement", "indirection"])],
)
def test_modes_of_a_half_that_does_not_fit_are_measured_in_pairs(
    bench: Bench, too_large: str, fitting: list[str]
) -> None:
    bench.run({too_large: "fail:oom"}, modes=TWO_HALVES)
    cells = bench.cells()
    assert {mode for mode, cell in cells.items() if cell.grouping is Grouping.HALVES} == {"compile", "graph", *fitting}
    assert all(not cells[mode].baseline_blocks for mode in fitting), "their baselines' rows are of the same group"
    assert (cells[too_large].status, cells[too_large].grouping) == (Status.OOM, Grouping.SEQUENTIAL)
    (paired,) = set(cells) - {"compile", "graph", too_large, *fitting}
    assert (cells[paired].grouping, cells[paired].group) == (Grouping.PAIRS, ["compile", paired])
    assert len(cells[paired].baseline_blocks["compile"]) == 5


def test_failed_common_baseline_leaves_the_other_rows_of_halves(bench: Bench) -> None:
    bench.run({"graph": "exit:5@measure"}, modes=TWO_HALVES, fits=4)
    cells = bench.cells()
    assert {cell.grouping for cell in cells.values()} == {Grouping.HALVES}
    assert [mode for mode, cell in cells.items() if cell.status is not Status.PASS] == ["graph"]
    for mode in ("placement", "indirection"):
        beside = cells[mode].baseline_blocks
        assert {name: len(blocks) for name, blocks in beside.items()} == {"compile": 5, "graph": 0}
    said = (bench.folder / "display").read_text()
    assert "FAKE graph: failed where it was measured once more, next to placement, indirection: the worker" in said


def test_a_workload_interrupted_in_its_second_half_starts_again(bench: Bench) -> None:
    log = bench.path / "logs" / "FAKE.indirection.log"
    with interrupted_once_it_hangs(log):
        bench.run({"indirection": "hang@measure"}, modes=TWO_HALVES, fits=4)
    assert read_run(bench.path).cells == ()
    bench.run(modes=TWO_HALVES, fits=4)
    assert {cell.grouping for cell in bench.cells().values()} == {Grouping.HALVES}


def test_modes_of_which_two_fit_are_measured_in_pairs(bench: Bench) -> None:
    bench.run(fits=2)
    cells = bench.cells()
    assert [cell.status for cell in cells.values()] == [Status.PASS] * 4
    assert [cell.grouping for cell in cells.values()] == [Grouping.PAIRS] * 4
    assert (cells["eager"].group, cells["eager"].baseline_blocks) == (["compile", "eager"], {}), "compile has its row"
    for mode in ("graph", "graph-unpartitioned"):
        assert cells[mode].group == ["compile", mode]
        ((baseline, theirs),) = cells[mode].baseline_blocks.items()
        assert baseline == "compile"
        assert [len(block.host_us) for block in theirs] == [6] * 5
        turns = sorted(b.turn for b in (*cells[mode].blocks, *theirs))
        assert turns == list(range(10)), "a pair alternates"
    assert cells["compile"].baseline_blocks == {}
    assert cells["compile"].group == ["compile", "eager"]
    assert len(cells["compile"].blocks) == 5
    assert cells["compile"].metrics is not None


def test_pairs_that_do_not_fit_are_measured_one_after_another(bench: Bench) -> None:
    bench.run(fits=1)
    cells = bench.cells()
    assert [cell.status for cell in cells.values()] == [Status.PASS] * 4
    assert [cell.grouping for cell in cells.values()] == [Grouping.SEQUENTIAL] * 4
    assert all(cell.group == [mode] and not cell.baseline_blocks for mode, cell in cells.items())


def test_mode_that_never_fits_is_out_of_memory_and_others_go_on(bench: Bench) -> None:
    bench.run({"graph": "fail:oom"})
    cells = bench.cells()
    assert cells["graph"].status is Status.OOM
    assert cells["graph"].grouping is Grouping.SEQUENTIAL
    assert {mode: cell.grouping for mode, cell in cells.items() if mode != "graph"} == {
        "eager": Grouping.PAIRS,
        "compile": Grouping.PAIRS,
        "graph-unpartitioned": Grouping.PAIRS,
    }


@pytest.mark.parametrize("phase", ["compile", "settle"])
def test_out_of_memory_before_measuring_leads_to_pairs(bench: Bench, phase: str) -> None:
    bench.run({"graph": f"fail:oom@{phase}"}, modes=FOUR[:3])
    cells = bench.cells()
    assert list(cells) == ["eager", "compile", "graph"]
    assert cells["eager"].grouping is Grouping.PAIRS
    assert (cells["graph"].status, cells["graph"].grouping) == (Status.OOM, Grouping.SEQUENTIAL)


def test_baseline_that_fails_in_pairs_leaves_others_alone(bench: Bench) -> None:
    bench.run({"compile": "fail:oom"}, modes=FOUR[:3])
    cells = bench.cells()
    assert cells["compile"].status is Status.OOM
    assert {cells[mode].grouping for mode in ("eager", "graph")} == {Grouping.SEQUENTIAL}
    assert {cells[mode].status for mode in ("eager", "graph")} == {Status.PASS}


def test_a_crash_beside_the_baseline_is_a_row_of_its_own(bench: Bench) -> None:
    bench.run({"graph": "exit:5", "eager": "fail:oom"}, modes=FOUR[:3])
    cells = bench.cells()
    assert cells["graph"].status is Status.CRASH
    assert (cells["graph"].grouping, cells["graph"].group) == (Grouping.PAIRS, ["compile", "graph"])
    assert (cells["compile"].status, cells["compile"].group) == (Status.PASS, ["compile", "graph"])
