"""How often `encore compare` finds a slowdown in recorded runs, and how often it finds one that is not there.

BASE and NEW are halves of one run, split by process: processes of one program on one GPU, started at different times.
A slowdown is made by multiplying all times of one mode of NEW.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import pytest
from recorded_runs import load_recorded

from suite.report.runs import Run, cell_label
from suite.report.two_runs.pairs import Comparison, Outcome, Pair, compare_runs
from suite.results.errors import EXIT_FINDING
from suite.results.schema import Block, Cell
from suite.results.store import RECORDED

RUNS = ("20261125-025731-h200", "20261125-090424-h200")
"""Thirteen workloads in eight modes, three to five processes of each, on two H200s; at two commits."""
MODES = ("encore", "placement", "indirection", "lean")
"""Modes that may become slower: those that are not the same program in every run."""
SPLITS = [split for split in itertools.product((0, 1), repeat=5) if len(set(split[:3])) == 2][::4]
"""A quarter of all ways to give five processes to two sides, so that each side has one of the first three."""


def half(run: Run, split: tuple[int, ...], side: int) -> Run:
    """Return the run with the processes of one side only."""

    def own(blocks: list[Block]) -> list[Block]:
        return [block for block in blocks if split[block.process] == side]

    cells = (
        cell.model_copy(
            update={
                "blocks": own(cell.blocks),
                "baseline_blocks": {mode: own(blocks) for mode, blocks in cell.baseline_blocks.items()},
            }
        )
        for cell in run.cells
    )
    return Run(run.environment.model_copy(update={"run_id": f"half {side}"}), tuple(cells))


def slower(run: Run, mode: str, factor: float) -> Run:
    """Return the run with all times of a mode multiplied."""

    def multiplied(cell: Cell) -> Cell:
        blocks = [
            block.model_copy(update={"host_us": [time * factor for time in block.host_us]}) for block in cell.blocks
        ]
        return cell.model_copy(update={"blocks": blocks})

    return Run(run.environment, tuple(multiplied(cell) if cell.mode == mode else cell for cell in run.cells))


@functools.cache
def halves(name: str, split: tuple[int, ...]) -> tuple[Run, Run]:
    run = load_recorded(RECORDED / name)
    base, new = (half(run, split, side) for side in (0, 1))
    assert len({cell_label(cell) for cell in base.cells}) == 13
    return base, new


@functools.cache
def unchanged(name: str, split: tuple[int, ...]) -> Comparison:
    return compare_runs(*halves(name, split))


@functools.cache
def changed(name: str, split: tuple[int, ...], mode: str, factor: float) -> Comparison:
    base, new = halves(name, split)
    return compare_runs(base, slower(new, mode, factor))


def pairs_of(made: Comparison, mode: str) -> dict[str, Pair]:
    return {pair.label: pair for pair in made.pairs if pair.mode == mode}


def cases() -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield every split of both runs, each with one mode after another."""
    for number, (name, split) in enumerate(itertools.product(RUNS, SPLITS)):
        yield name, split, MODES[number % len(MODES)]


def test_unchanged_halves_are_not_slower() -> None:
    """At most 5 % of all comparisons end with exit code 1, and of all rows, each for itself."""
    made = [unchanged(name, split) for name, split in itertools.product(RUNS, SPLITS)]
    assert sum(each.exit_code == EXIT_FINDING for each in made) <= 0.05 * len(made)
    rows = [pair for each in made for mode in MODES for pair in pairs_of(each, mode).values()]
    assert len(rows) == 13 * len(MODES) * len(made)
    assert sum(pair.outcome is Outcome.REGRESSION for pair in rows) <= 0.05 * len(rows)


def test_slowdown_of_5_percent_is_found_in_the_mean() -> None:
    found = [changed(*case, 1.05).means[case[2]].outcome is Outcome.REGRESSION for case in cases()]
    assert sum(found) >= 0.9 * len(found)


def test_slowdown_of_10_percent_is_found_in_known_workloads() -> None:
    """Every workload whose interval of the unchanged halves is within 3 % is found."""
    known = missed = 0
    for name, split, mode in cases():
        after = pairs_of(changed(name, split, mode, 1.10), mode)
        for label, pair in pairs_of(unchanged(name, split), mode).items():
            if pair.change and pair.change.low >= 1 / 1.03 and pair.change.high <= 1.03:
                known += 1
                missed += after[label].outcome is not Outcome.REGRESSION
    assert known >= 25 and missed == 0


def test_slowdown_by_half_is_found_in_each_workload() -> None:
    rows = [pair for case in cases() for pair in pairs_of(changed(*case, 1.5), case[2]).values()]
    assert sum(pair.outcome is Outcome.REGRESSION for pair in rows) >= 0.9 * len(rows)
    assert all(changed(*case, 1.5).exit_code == EXIT_FINDING for case in cases())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [1.05, 1.5])
def test_slowdown_between_two_commits_is_found(mode: str, factor: float) -> None:
    base, new = (load_recorded(RECORDED / name) for name in RUNS)
    before = compare_runs(base, new).means[mode].change
    made = compare_runs(base, slower(new, mode, factor))
    assert made.means[mode].outcome is Outcome.REGRESSION
    assert math.log(made.means[mode].change.value) == pytest.approx(math.log(before.value / factor), abs=1e-6)
    others = [mean.outcome for other, mean in made.means.items() if other in MODES and other != mode]
    assert Outcome.REGRESSION not in others
