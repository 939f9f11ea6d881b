"""Every mode of a run against its baselines: ratios with intervals and verdicts; and means over workloads."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from suite.measure.kernels import difference, only_moves
from suite.measure.modes import MODES, REFERENCE_MODE
from suite.report.load import Run, cell_label
from suite.results import stats
from suite.results.errors import EncoreError
from suite.results.schema import Block, Cell, Grouping, Status


class TimeKind(StrEnum):
    """What is compared: host time of one iteration to completion, the time of the device in it, or the mean over
    iterations issued back to back."""

    LATENCY = "latency"
    DEVICE = "device"
    THROUGHPUT = "throughput"


Process = list[list[float]]
"""Samples of a process by block."""

SAMPLES: dict[TimeKind, Callable[[Block], list[float]]] = {
    TimeKind.LATENCY: lambda block: block.host_us,
    TimeKind.DEVICE: lambda block: block.device_us or [],
    TimeKind.THROUGHPUT: lambda block: [] if block.throughput_us is None else [block.throughput_us],
}
"""The times in a block, in microseconds."""


class Kernels(StrEnum):
    """Whether the two sides of a ratio ran the same kernels. If not, it compares two results of Inductor's tuning."""

    EAGER = "eager"
    """One side is not compiled: that its kernels are others is what is measured."""
    SAME = "same"
    """Those of both sides that are tuned are launched alike."""
    GENERATED = "other program"
    """The same, and one side has generated kernels that the other lacks: placement changed the program, say."""
    RETUNED = "tuned otherwise"
    """A kernel that both have is launched otherwise, or one side has another kernel of a library."""
    UNKNOWN = "tuned apart"
    """Each side tuned its kernels by itself, and nobody recorded which ones it ran."""
    UNSEEN = "kernels not seen"
    """Nobody looked at the kernels of a process that samples are of: memory was short, or the run ended."""
    OTHER = "void: other kernels"
    """The ratio follows that of the kernel times, or is over a process whose kernels nobody timed."""


COMPARABLE = (Kernels.EAGER, Kernels.SAME, Kernels.GENERATED)
"""Where a ratio is one of modes."""

UNSETTLED = "unsettled"
"""The mark of a ratio without a verdict, because a side still recorded graphs, or looked for places to read in place,
when it was timed."""

FOLLOWS_KERNELS = 0.5
"""A ratio follows that of the kernel times if these explain this share of its logarithm."""
LEAST_KERNEL_RATIO = 1.02
"""Kernel times that differ by less are taken for equal: the profiler's own scatter."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A cell against the same row in its baseline mode.

    `ratio`, `verdict` and `kernels` are None where there is nothing to compare, and `missing` says why.
    `verdict` is None too where the sides may have run other kernels, or one had not `settled`: then the ratio is not a
    gain of the mode's.
    `alternating` tells whether the blocks of the two modes alternated; where not, drift between them is in the ratio.
    """

    cell: Cell
    baseline: str
    metric: TimeKind
    ratio: stats.Ratio | None
    verdict: stats.Verdict | None
    alternating: bool
    missing: str | None
    kernels: Kernels | None = None
    settled: bool = True

    @property
    def is_gain(self) -> bool:
        """Whether the ratio is one of modes, and not of two results of tuning, or of a mode that had not settled."""
        return self.ratio is not None and self.kernels in COMPARABLE and self.settled

    @property
    def mark(self) -> str:
        """What stands behind the ratio: its verdict, or why it has none."""
        if self.verdict is not None:
            return self.verdict.value
        return UNSETTLED if self.kernels in COMPARABLE and not self.settled else str(self.kernels or "")


def baselines(cell: Cell) -> tuple[str, ...]:
    """Modes a cell is compared with: the reference of all figures, then those its own mode declares."""
    return tuple(dict.fromkeys(mode for mode in (REFERENCE_MODE, *cell.baselines) if mode != cell.mode))


def compare(run: Run, metrics: Sequence[TimeKind] = tuple(TimeKind)) -> tuple[Comparison, ...]:
    """Compare each cell of a run with each of its baselines, in these metrics, in the order of the cells.

    Raises:
        EncoreError: a recorded time is not positive.
    """
    rows: dict[str, list[Cell]] = {}
    for cell in run.cells:
        rows.setdefault(cell_label(cell), []).append(cell)
    spreads = {(label, metric): spread_of(row, metric) for label, row in rows.items() for metric in metrics}
    return tuple(
        _compare_cell(rows[label], cell, baseline, metric, spreads[label, metric])
        for cell, label in ((cell, cell_label(cell)) for cell in run.cells)
        for baseline in baselines(cell)
        for metric in metrics
    )


def spread_of(row: Sequence[Cell], metric: TimeKind) -> stats.Spread:
    """What the ratios of a row's modes that were measured in turn tell of how much processes differ.

    Raises:
        EncoreError: a recorded time is not positive.
    """
    passed = {cell.mode: cell for cell in row if cell.status is Status.PASS}
    by_process, modes = [], set()
    for cell in passed.values():
        for reference in (passed[mode] for mode in baselines(cell) if mode in passed):
            ours, theirs, alternating = _samples(cell, reference, metric)
            if len(ours) > 1 and alternating:
                with _naming(cell, reference, metric):
                    by_process.append(stats.log_ratios(theirs, ours))
                modes |= {cell.mode, reference.mode}  # others tell nothing: one process, or measured one after another
    return stats.spread_of(by_process, len(modes))


@contextmanager
def _naming(cell: Cell, reference: Cell, metric: TimeKind) -> Iterator[None]:
    """Samples that are no times are an error that says whose they are."""
    try:
        yield
    except ValueError as error:
        raise EncoreError(
            f"the recorded {metric} samples of {_name(cell, reference)} cannot be compared: {error}"
        ) from error


def _name(cell: Cell, reference: Cell) -> str:
    return f"{cell_label(cell)} {cell.mode} over {reference.mode}"


def against(run: Run, cell: Cell, mode: str, metric: TimeKind = TimeKind.LATENCY) -> Comparison:
    """A cell against any other mode of its row, its own baseline or not.

    Raises:
        EncoreError: a recorded time is not positive.
    """
    row = [other for other in run.cells if cell_label(other) == cell_label(cell)]
    return _compare_cell(row, cell, mode, metric, spread_of(row, metric))


def ratios_by_process(cell: Cell, reference: Cell, metric: TimeKind = TimeKind.LATENCY) -> NDArray[np.float64] | None:
    """Return log(time of `reference` / time of `cell`) of each process that both have; None without samples.

    Raises:
        EncoreError: a recorded time is not positive.
    """
    ours, theirs, _ = _samples(cell, reference, metric)
    with _naming(cell, reference, metric):
        return stats.log_ratios(theirs, ours) if ours else None


def find(comparisons: Sequence[Comparison], cell: Cell, baseline: str, metric: TimeKind) -> Comparison | None:
    """The comparison of this cell with this baseline."""
    return next(
        (item for item in comparisons if item.cell is cell and item.baseline == baseline and item.metric is metric),
        None,
    )


def mean_over(
    comparisons: Sequence[Comparison], mode: str, baseline: str, labels: Sequence[str]
) -> stats.GeometricMean | None:
    """Geometric mean of a mode over a baseline, by latency, over those of these rows that have a gain."""
    gains = [
        item.ratio
        for item in comparisons
        if (item.cell.mode, item.baseline, item.metric) == (mode, baseline, TimeKind.LATENCY)
        if item.is_gain and item.ratio is not None and cell_label(item.cell) in labels
    ]
    return stats.geometric_mean(gains) if gains else None


def common_means(
    comparisons: Sequence[Comparison], modes: Sequence[str], baseline: str, labels: Sequence[str]
) -> dict[str, stats.GeometricMean]:
    """Geometric means by mode over those of these rows that all modes have: only such means can be set side by side.

    A mode that ran in less than half of the rows of another, as `step` where it was named, has none.
    """
    gains: dict[str, set[str]] = {mode: set() for mode in modes}
    for item in comparisons:
        if item.cell.mode in gains and (item.baseline, item.metric) == (baseline, TimeKind.LATENCY) and item.is_gain:
            gains[item.cell.mode] |= {cell_label(item.cell)} & set(labels)
    most = max(map(len, gains.values()), default=0)
    wide = [mode for mode, own in gains.items() if own and 2 * len(own) >= most]
    common = sorted(set.intersection(*(gains[mode] for mode in wide))) if wide else []
    means = {mode: mean_over(comparisons, mode, baseline, common) for mode in wide}
    return {mode: mean for mode, mean in means.items() if mean is not None}


def _compare_cells(cell: Cell, reference: Cell, metric: TimeKind, spread: stats.Spread) -> Comparison:
    """One cell against another of its row, in the processes that both have. `spread`: see `spread_of`.

    Raises:
        EncoreError: a recorded time is not positive.
    """
    ours, theirs, alternating = _samples(cell, reference, metric)
    if not ours:
        return Comparison(cell, reference.mode, metric, None, None, False, f"no {metric} samples")
    seed = zlib.crc32(f"{_name(cell, reference)} {metric}".encode())
    with _naming(cell, reference, metric):
        ratio = stats.speed_up(theirs, ours, seed=(seed,), spread=spread)
    kernels = compare_kernels(cell, reference, ratio.value)
    settled = has_settled(cell) and has_settled(reference)
    verdict = stats.judge(ratio) if kernels in COMPARABLE and settled else None
    return Comparison(cell, reference.mode, metric, ratio, verdict, alternating, None, kernels, settled)


def has_settled(cell: Cell) -> bool:
    """Whether no process of the cell is known to have been timed before its graphs were as they would stay."""
    times = [cell.compile, *(later.compile for later in cell.later)]
    return all(one is None or one.settled is not False for one in times)


def _compare_cell(row: Sequence[Cell], cell: Cell, baseline: str, metric: TimeKind, spread: stats.Spread) -> Comparison:
    reference = next((other for other in row if other.mode == baseline), None)
    missing = _missing(cell, baseline, reference)
    if missing is None and reference is not None:
        return _compare_cells(cell, reference, metric, spread)
    return Comparison(cell, baseline, metric, None, None, False, missing)


def _ran_others(cell: Cell) -> bool:
    """Whether the processes of this row, and those of baselines measured with it, ran different kernels.

    Older rows also counted kernels that only move data. Their later processes name what was counted.
    """
    told = {later.process: later.retuned for later in cell.later}
    return any(not told.get(process) or not all(map(only_moves, told[process])) for process in cell.other_kernels)


def _unseen(cell: Cell, reference: Cell) -> bool:
    """Whether nobody looked at the kernels of a process of either that has samples."""
    modes = (cell.mode, reference.mode)
    shortages = [*cell.shortages, *reference.shortages]
    return any(one.mode in modes and one.phase != "prepare" for one in shortages)


def compare_kernels(cell: Cell, reference: Cell, ratio: float) -> Kernels:
    """Whether both ran the same kernels, as far as their rows tell.

    Rows without names of kernels have the sum of their times. Where a ratio follows that sum, nobody can tell what the
    mode did from what tuning did. Of a baseline that ran again in another group, the row has not even that sum.
    """
    if any(side.mode in MODES and MODES[side.mode].backend is None for side in (cell, reference)):
        return Kernels.EAGER
    if _ran_others(cell) or _ran_others(reference):
        return Kernels.RETUNED
    if _unseen(cell, reference):
        return Kernels.UNSEEN
    if cell.metrics and reference.metrics and cell.metrics.kernels and reference.metrics.kernels:
        found = difference(cell.metrics.kernels, reference.metrics.kernels)
        return Kernels.RETUNED if found.retuned else Kernels.GENERATED if found.generated else Kernels.SAME
    ours, theirs = (side.metrics.kernel_time_us if side.metrics else None for side in (cell, reference))
    if reference.mode in cell.baseline_blocks:
        return Kernels.OTHER
    if not ours or not theirs:
        return Kernels.UNKNOWN
    of_kernels = math.log(theirs / ours)
    differ = abs(of_kernels) >= math.log(LEAST_KERNEL_RATIO)
    follows = of_kernels * math.log(ratio) > 0 and abs(of_kernels) >= FOLLOWS_KERNELS * abs(math.log(ratio))
    return Kernels.OTHER if differ and follows else Kernels.UNKNOWN


def _missing(cell: Cell, baseline: str, reference: Cell | None) -> str | None:
    if cell.status is not Status.PASS:
        return cell.status.value
    if reference is None:
        return f"{baseline}: not run"
    return None if reference.status is Status.PASS else f"{baseline}: {reference.status.value}"


def _samples(cell: Cell, reference: Cell, metric: TimeKind) -> tuple[list[Process], list[Process], bool]:
    """Samples of both sides by process and block, and whether they were measured in turn.

    If so, of the blocks that both have: a mode that ran out of memory, or was interrupted, has fewer.
    """
    if theirs := cell.baseline_blocks.get(reference.mode):
        alternating = True
    else:
        theirs = reference.blocks
        same_group = (cell.grouping, cell.group) == (reference.grouping, reference.group)
        again = reference.mode in cell.baseline_blocks  # it has none there, and its row is of another time
        alternating = same_group and not again and cell.grouping is not Grouping.SEQUENTIAL
    blocks = _shared(cell.blocks, theirs) if alternating else (cell.blocks, theirs)
    sides = [samples_by_process(side, metric) for side in blocks]
    both = sorted(sides[0].keys() & sides[1].keys())
    return [sides[0][process] for process in both], [sides[1][process] for process in both], alternating


def _shared(*sides: Sequence[Block]) -> tuple[list[Block], ...]:
    """The blocks that all sides have."""
    both = set.intersection(*({(block.process, block.index) for block in side} for side in sides))
    return tuple([block for block in side if (block.process, block.index) in both] for side in sides)


def samples_by_process(blocks: Sequence[Block], metric: TimeKind) -> dict[int, Process]:
    """Return the samples of each process that has any, in the order of its blocks."""
    found: dict[int, Process] = {}
    for block in blocks:
        if samples := SAMPLES[metric](block):
            found.setdefault(block.process, []).append(samples)
    return found
