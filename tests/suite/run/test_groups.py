"""Modes that do not fit on the GPU together: measured in halves, in pairs with their baseline, or one after another."""

from __future__ import annotations

import pytest
from fixtures.bench import FOUR, Bench, bench
from fixtures.fake_runs import events

from suite.measure.modes import select_modes
from suite.results.schema import Grouping, Status

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


def test_modes_of_which_two_fit_are_measured_in_pairs(bench: Bench) -> None:
    bench.run(fits=2)
    cells = bench.cells()
    assert [(cell.status, cell.grouping) for cell in cells.values()] == [(Status.PASS, Grouping.PAIRS)] * 4
    assert cells["eager"].group == cells["compile"].group == ["compile", "eager"]
    assert cells["eager"].baseline_blocks == cells["compile"].baseline_blocks == {}, "compile has its row"
    for mode in ("graph", "graph-unpartitioned"):
        assert cells[mode].group == ["compile", mode]
        ((baseline, theirs),) = cells[mode].baseline_blocks.items()
        assert (baseline, [len(block.host_us) for block in theirs]) == ("compile", [6] * 5)
        turns = sorted(b.turn for b in (*cells[mode].blocks, *theirs))
        assert turns == list(range(10)), "a pair alternates"
    assert len(cells["compile"].blocks) == 5 and cells["compile"].metrics is not None


@pytest.mark.parametrize("phase", ["", "@compile", "@settle", "@measure"])
def test_out_of_memory_before_any_block_leads_to_pairs(bench: Bench, phase: str) -> None:
    bench.run({"graph": f"fail:oom{phase}"}, modes=FOUR[:3])
    cells = bench.cells()
    assert list(cells) == ["eager", "compile", "graph"]
    assert cells["eager"].grouping is (Grouping.TOGETHER if phase == "@measure" else Grouping.PAIRS)
    assert (cells["graph"].status, cells["graph"].grouping) == (Status.OOM, Grouping.SEQUENTIAL)
    assert cells["eager"].status is cells["compile"].status is Status.PASS


def test_mode_without_a_block_moves_to_a_smaller_group(bench: Bench) -> None:
    bench.run({"graph": "once:fail:oom@measure"}, modes=FOUR[:3])
    cells = bench.cells()
    assert {cell.status for cell in cells.values()} == {Status.PASS}
    assert (cells["compile"].grouping, cells["graph"].grouping) == (Grouping.TOGETHER, Grouping.PAIRS)
    assert [block.index for block in cells["graph"].baseline_blocks["compile"]] == list(range(5))
    assert len(bench.measured()) == 10 + 10, "the baseline once more, next to it"


@pytest.mark.parametrize("phase", ["prepare", "compile", "settle", "measure", "metrics"])
def test_later_process_that_does_not_fit_is_one_fewer(bench: Bench, phase: str) -> None:
    bench.run({"graph": f"later:fail:oom@{phase}"}, modes=FOUR[:3], processes=3)
    cells = bench.cells()
    assert {(cell.status, cell.grouping) for cell in cells.values()} == {(Status.PASS, Grouping.TOGETHER)}
    assert {mode: (cell.processes, len(cell.blocks)) for mode, cell in cells.items()} == {
        "eager": (3, 15), "compile": (3, 15), "graph": (1, 5),
    }  # fmt: skip
    assert cells["graph"].metrics is not None
    assert "graph: process 2 does not fit into memory, and is left out" in (bench.folder / "display").read_text()


@pytest.mark.parametrize("phase", ["block:2:fail:oom@measure", "fail:oom@once", "fail:oom@metrics"])
def test_lack_of_memory_after_blocks_is_reported_with_them(bench: Bench, phase: str) -> None:
    bench.run({"graph": phase}, modes=FOUR[:3])
    cells = bench.cells()
    assert {name: cell.status is Status.PASS for name, cell in cells.items()} == {
        "eager": True, "compile": True, "graph": False,
    }  # fmt: skip
    assert (cells["graph"].status, cells["graph"].grouping) == (Status.OOM, Grouping.TOGETHER)
    assert len(cells["graph"].blocks) == (2 if "block" in phase else 5)


@pytest.mark.parametrize(("phase", "then"), [("once", "once graph"), ("metrics", "metrics graph")])
def test_memory_is_freed_before_another_process_continues(bench: Bench, phase: str, then: str) -> None:
    bench.run({"compile": f"linger@{phase}"}, modes=FOUR[:3])
    said = [" ".join(words) for words in events(bench.folder)]
    assert said.index("gone compile") < said.index(then)
