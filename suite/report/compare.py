"""Compare every mode of a run with its baselines: ratios with intervals and verdicts; and means over workloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from suite.measure.kernels import difference
from suite.measure.modes import GRAPH_MODE, MODES, REFERENCE_MODE
from suite.report.runs import cell_label, mode_order
from suite.results import stats
from suite.results.schema import Block, Cell, Grouping, Status

Process = list[list[float]]
"""Host times of a process by block, in microseconds."""


class Kernels(StrEnum):
    """Classify whether both sides of a ratio ran the same kernels; otherwise it compares results of tuning."""

    EAGER = "eager"
    """One side is not compiled, so that the difference of kernels is part of the comparison."""
    SAME = "same"
    """The tuned kernels of both sides have equal launch configurations."""
    GENERATED = "other program"
    """The same, but one side has additional generated kernels, for example because placement changed the program."""
    RETUNED = "tuned otherwise"
    """A kernel of both has different launch configurations, or the sides use different library kernels."""
    UNSEEN = "kernels not seen"
    """The kernels were not recorded, because the run is on a CPU."""


COMPARABLE = (Kernels.EAGER, Kernels.SAME, Kernels.GENERATED)
"""Kinds for which a ratio compares modes."""

STOCK_MODES = (REFERENCE_MODE, GRAPH_MODE)
"""Modes that others are compared with everywhere: PyTorch's without CUDA graphs, and with them."""

VERDICT_WORDS = {
    stats.Verdict.FAST: "faster",
    stats.Verdict.SAME: "the same",
    stats.Verdict.SLOW: "slower",
    stats.Verdict.AMBG: "undecided",
    None: "without a verdict",
}

UNSETTLED = "unsettled"
"""The mark of a ratio without a verdict, because a side was timed before its graphs were final."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hold the comparison of a cell's host times with those of the same row in its baseline mode.

    `ratio`, `verdict` and `kernels` are None if nothing can be compared; `missing` is the reason.
    `verdict` is also None if the sides may have run different kernels, or one had not `settled`: then the ratio does
    not measure the mode.
    `alternating`: the blocks of the two modes alternated; otherwise the ratio includes drift.
    """

    cell: Cell
    baseline: str
    ratio: stats.Ratio | None
    verdict: stats.Verdict | None
    alternating: bool
    missing: str | None
    kernels: Kernels | None = None
    settled: bool = True

    @property
    def is_gain(self) -> bool:
        """Return whether the ratio compares settled modes with the same kernels, and not results of tuning."""
        return self.ratio is not None and self.kernels in COMPARABLE and self.settled

    @property
    def mark(self) -> str:
        """Return the text after the ratio: its verdict, or the reason why it has none."""
        if self.verdict is not None:
            return self.verdict.value
        return UNSETTLED if self.kernels in COMPARABLE and not self.settled else str(self.kernels or "")


def baselines(cell: Cell) -> tuple[str, ...]:
    """Return the modes a cell is compared with: the reference of all figures, then its mode's baselines."""
    return tuple(dict.fromkeys(mode for mode in (REFERENCE_MODE, *cell.baselines) if mode != cell.mode))


class Ratios(Iterable[Comparison]):
    """Compute all ratios of a run's cells, with their means and verdicts, each once.

    Iteration yields each cell over each of its baselines, in the order of the cells. Values are computed when they are
    used.
    """

    def __init__(self, cells: Sequence[Cell] = ()) -> None:
        self.cells = cells
        self.modes = tuple(sorted({cell.mode for cell in cells}, key=mode_order))
        """Modes that occur, in the order of `MODES`."""
        self._rows: dict[str, dict[str, Cell]] = {}
        for cell in cells:
            self._rows.setdefault(cell_label(cell), {}).setdefault(cell.mode, cell)
        self.labels = tuple(self._rows)
        """Labels of rows, in the order of the cells."""
        self._spreads: dict[str, stats.Spread] = {}
        self._found: dict[tuple[int, str], Comparison] = {}

    def __iter__(self) -> Iterator[Comparison]:
        for cell in self.cells:
            yield from (self.against(cell, baseline) for baseline in baselines(cell))

    def cell(self, label: str, mode: str) -> Cell | None:
        """Return the cell of a row in a mode, passed or not."""
        return self._rows.get(label, {}).get(mode)

    def row(self, label: str) -> tuple[Cell, ...]:
        """Return the cells of a row."""
        return tuple(self._rows.get(label, {}).values())

    def against(self, cell: Cell, mode: str) -> Comparison:
        """Compare a cell with any other mode of its row."""
        key = (id(cell), mode)
        if key not in self._found:
            label = cell_label(cell)
            row = self._rows[label]
            if label not in self._spreads:
                self._spreads[label] = spread_of(list(row.values()))
            self._found[key] = _compare_cell(cell, mode, row.get(mode), self._spreads[label])
        return self._found[key]

    def find(self, label: str, mode: str, baseline: str = REFERENCE_MODE) -> Comparison | None:
        """Compare two modes of a row; None where `mode` was not run."""
        cell = self.cell(label, mode)
        return None if cell is None else self.against(cell, baseline)

    def gain(self, label: str, mode: str, baseline: str = REFERENCE_MODE) -> stats.Ratio | None:
        """Return the ratio if it compares settled modes with the same kernels; means use only these."""
        item = self.find(label, mode, baseline)
        return item.ratio if item is not None and item.is_gain else None

    def means(self, labels: Iterable[str], pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], stats.Ratio]:
        """Return the geometric means of (mode, baseline) over the rows that all of the pairs have.

        Only such means can be compared. A mode that ran in less than half of the rows of another has none; `step` is an
        example.
        """
        rows = list(labels)
        gains = {
            pair: {label: gain for label in rows if (gain := self.gain(label, *pair)) is not None} for pair in pairs
        }
        most = max(map(len, gains.values()), default=0)
        wide = {pair: own for pair, own in gains.items() if own and 2 * len(own) >= most}
        common = sorted(set.intersection(*map(set, wide.values()))) if wide else []
        return {pair: stats.geometric_mean([own[row] for row in common]) for pair, own in wide.items() if common}

    def mean(self, labels: Iterable[str], mode: str, baseline: str) -> stats.Ratio | None:
        """Return the geometric mean of one mode over the rows with a ratio."""
        return self.means(labels, [(mode, baseline)]).get((mode, baseline))

    def verdicts(self, labels: Iterable[str], mode: str, baseline: str) -> Counter[stats.Verdict | None]:
        """Count the verdicts on these rows; None counts the ratios without one."""
        items = (self.find(label, mode, baseline) for label in labels)
        return Counter(item.verdict for item in items if item is not None and item.ratio is not None)


def mean_text(mean: stats.Ratio) -> str:
    """Write a geometric mean with its interval and its number of workloads."""
    return f"{mean.text()} of {mean.count}"


def spread_of(row: Sequence[Cell]) -> stats.Spread:
    """Estimate the variance between processes from the ratios of a row's modes whose blocks alternated."""
    passed = {cell.mode: cell for cell in row if cell.status is Status.PASS}
    by_process, modes = [], set()
    for cell in passed.values():
        for reference in (passed[mode] for mode in baselines(cell) if mode in passed):
            ours, theirs, alternating = _samples(cell, reference)
            if len(ours) > 1 and alternating:
                by_process.append([stats.log_ratios(theirs, ours)])
                modes |= {cell.mode, reference.mode}  # not with one process, or without alternation
    return stats.spread_of(by_process, len(modes))


def ratios_by_process(cell: Cell, reference: Cell) -> stats.LogRatios | None:
    """Return log(time of `reference` / time of `cell`) of each process that both have; None without samples."""
    ours, theirs, _ = _samples(cell, reference)
    return stats.log_ratios(theirs, ours) if ours else None


def has_settled(cell: Cell) -> bool:
    """Return whether no process of the cell is known to have been timed before its graphs were final."""
    times = [cell.compile, *(later.compile for later in cell.later)]
    return all(one is None or one.settled is not False for one in times)


def _compare_cell(cell: Cell, baseline: str, reference: Cell | None, spread: stats.Spread) -> Comparison:
    """Compare a cell with another of its row, over their common processes. `spread`: see `spread_of`."""
    missing = _missing(cell, baseline, reference)
    if missing is not None or reference is None:
        return Comparison(cell, baseline, None, None, False, missing)
    ours, theirs, alternating = _samples(cell, reference)
    if not ours:
        return Comparison(cell, baseline, None, None, False, "no samples")
    ratio = stats.speed_up(theirs, ours, spread)
    kernels = compare_kernels(cell, reference)
    settled = has_settled(cell) and has_settled(reference)
    verdict = stats.judge(ratio) if kernels in COMPARABLE and settled else None
    return Comparison(cell, baseline, ratio, verdict, alternating, None, kernels, settled)


def compare_kernels(cell: Cell, reference: Cell) -> Kernels:
    """Return whether both ran the same kernels, according to their rows."""
    if any(side.mode in MODES and MODES[side.mode].backend is None for side in (cell, reference)):
        return Kernels.EAGER
    if cell.other_kernels or reference.other_kernels:
        return Kernels.RETUNED
    ours, theirs = (side.at("metrics.kernels") for side in (cell, reference))
    if not ours or not theirs:
        return Kernels.UNSEEN
    found = difference(ours, theirs)
    return Kernels.RETUNED if found.retuned else Kernels.GENERATED if found.generated else Kernels.SAME


def _missing(cell: Cell, baseline: str, reference: Cell | None) -> str | None:
    if cell.status is not Status.PASS:
        return cell.status.value
    if reference is None:
        return f"{baseline}: not run"
    return None if reference.status is Status.PASS else f"{baseline}: {reference.status.value}"


def _samples(cell: Cell, reference: Cell) -> tuple[list[Process], list[Process], bool]:
    """Return samples of both sides by process and block, and whether the blocks alternated."""
    if theirs := cell.baseline_blocks.get(reference.mode):
        alternating = True
    else:
        theirs = reference.blocks
        same_group = (cell.grouping, cell.group) == (reference.grouping, reference.group)
        again = reference.mode in cell.baseline_blocks  # it has none there, and its row was measured at another time
        alternating = same_group and not again and cell.grouping is not Grouping.SEQUENTIAL
    sides = [samples_by_process(side) for side in (cell.blocks, theirs)]
    both = sorted(sides[0].keys() & sides[1].keys())
    return [sides[0][process] for process in both], [sides[1][process] for process in both], alternating


def samples_by_process(blocks: Sequence[Block]) -> dict[int, Process]:
    """Return the samples of each process that has any, in the order of its blocks."""
    found: dict[int, Process] = {}
    for block in blocks:
        if block.host_us:
            found.setdefault(block.process, []).append(block.host_us)
    return found
