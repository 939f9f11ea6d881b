"""Every mode of a run against its baselines: ratios with intervals, floors, verdicts; and means over workloads."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from suite import stats
from suite.errors import EncoreError
from suite.modes import REFERENCE_MODE
from suite.report.load import Run, cell_label
from suite.schema import Block, Cell, Grouping, Status


class Metric(StrEnum):
    """What is compared: host time of one iteration to completion, or the mean over iterations issued back to back."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


_SAMPLES: dict[Metric, Callable[[Block], list[float]]] = {
    Metric.LATENCY: lambda block: block.host_us,
    Metric.THROUGHPUT: lambda block: [] if block.throughput_us is None else [block.throughput_us],
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A cell against the same row in its baseline mode.

    `ratio`, `floor` and `verdict` are None where there is nothing to compare, and `missing` says why. `alternating`
    tells whether the blocks of the two modes alternated; where not, drift between them is in the ratio.
    """

    cell: Cell
    baseline: str
    metric: Metric
    ratio: stats.Ratio | None
    floor: float | None
    verdict: stats.Verdict | None
    alternating: bool
    missing: str | None


@dataclass(frozen=True, slots=True)
class MeanSpeedup:
    """Geometric mean of a mode over `baseline`. `common` tells whether only rows count where every mode passed."""

    mode: str
    baseline: str
    metric: Metric
    common: bool
    mean: stats.GeometricMean


def baselines(cell: Cell) -> tuple[str, ...]:
    """Modes a cell is compared with: the reference of all figures, then those its own mode declares."""
    return tuple(dict.fromkeys(mode for mode in (REFERENCE_MODE, *cell.baselines) if mode != cell.mode))


def compare(run: Run) -> tuple[Comparison, ...]:
    """Each cell of a run against each of its baselines, in both metrics, in the order of the cells.

    Raises:
        EncoreError: a recorded time is not positive.
    """
    return tuple(
        _compare_cell(run, cell, baseline, metric)
        for cell in run.cells
        for baseline in baselines(cell)
        for metric in Metric
    )


def find(comparisons: Sequence[Comparison], cell: Cell, baseline: str, metric: Metric) -> Comparison | None:
    """The comparison of this cell with this baseline."""
    return next(
        (item for item in comparisons if item.cell is cell and item.baseline == baseline and item.metric is metric),
        None,
    )


def mean_speedups(comparisons: Sequence[Comparison]) -> tuple[MeanSpeedup, ...]:
    """Geometric means over workloads per mode, baseline and metric, in the order of the comparisons.

    Each is given over all workloads that both modes have. Where the modes of one baseline and metric differ in that,
    each also has one over the workloads that all of these modes have, as only those can be set side by side; a mode
    without a single result is left out of this.
    """
    ratios: dict[tuple[str, Metric], dict[str, dict[str, stats.Ratio]]] = {}
    for item in comparisons:
        if item.ratio is not None:
            modes = ratios.setdefault((item.baseline, item.metric), {})
            modes.setdefault(item.cell.mode, {})[cell_label(item.cell)] = item.ratio
    means = []
    for (baseline, metric), modes in ratios.items():
        common = set.intersection(*(set(own) for own in modes.values()))
        partial = any(set(own) != common for own in modes.values())
        for mode, own in modes.items():
            means.append(MeanSpeedup(mode, baseline, metric, False, stats.geometric_mean(list(own.values()))))
            if partial and common:
                shared = [own[label] for label in sorted(common)]
                means.append(MeanSpeedup(mode, baseline, metric, True, stats.geometric_mean(shared)))
    return tuple(means)


def _compare_cell(run: Run, cell: Cell, baseline: str, metric: Metric) -> Comparison:
    reference = run.find(cell_label(cell), baseline)
    missing = _missing(cell, baseline, reference)
    if missing is None and reference is not None:
        ours, theirs, alternating = _blocks(cell, reference, metric)
        if ours and theirs:
            return _judged(cell, baseline, metric, ours, theirs, alternating)
        missing = f"no {metric} samples"
    return Comparison(cell, baseline, metric, None, None, None, False, missing)


def _judged(
    cell: Cell, baseline: str, metric: Metric, ours: stats.Blocks, theirs: stats.Blocks, alternating: bool
) -> Comparison:
    name = f"{cell_label(cell)} {cell.mode} over {baseline}"
    estimate, floor_of = (
        (stats.paired_ratio, stats.noise_floor) if alternating else (stats.unpaired_ratio, stats.drift_floor)
    )
    try:
        ratio = estimate(theirs, ours, seed=(zlib.crc32(f"{name} {metric}".encode()),))
        floors = [floor_of(ours), floor_of(theirs)]
    except ValueError as error:
        raise EncoreError(f"the recorded {metric} samples of {name} cannot be compared: {error}") from error
    known = [floor for floor in floors if floor is not None]
    floor = max(known) if len(known) == len(floors) else None
    return Comparison(cell, baseline, metric, ratio, floor, stats.judge(ratio, floor), alternating, None)


def _missing(cell: Cell, baseline: str, reference: Cell | None) -> str | None:
    if cell.status is not Status.PASS:
        return cell.status.value
    if reference is None:
        return f"{baseline}: not run"
    return None if reference.status is Status.PASS else f"{baseline}: {reference.status.value}"


def _blocks(cell: Cell, reference: Cell, metric: Metric) -> tuple[list[list[float]], list[list[float]], bool]:
    """Samples of both sides by block, and whether block k of one alternated with block k of the other."""
    if theirs := cell.baseline_blocks.get(reference.mode):
        alternating = True
    else:
        theirs = reference.blocks
        same_group = (cell.grouping, cell.group) == (reference.grouping, reference.group)
        alternating = same_group and cell.grouping in (Grouping.TOGETHER, Grouping.HALVES)
    by_index = [{block.index: _SAMPLES[metric](block) for block in blocks} for blocks in (cell.blocks, theirs)]
    ours, other = ({index: samples for index, samples in side.items() if samples} for side in by_index)
    if alternating:
        both = sorted(ours.keys() & other.keys())
        return [ours[index] for index in both], [other[index] for index in both], True
    return list(ours.values()), list(other.values()), False
