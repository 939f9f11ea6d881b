"""Cells of two sides that belong together, their ratio, and a verdict; or the reason why there is none.

Note [Same against same]: two runs never alternated, so whatever drifted between them is in every ratio, and no interval
within a run can know it. What tells is cells that are the same program in both: modes that Encore has no part in, where
PyTorch, driver and GPU are equal. Their ratios should be 1; the 95th percentile of how far they are from it is the
floor for all the others (each of them has the floor of the rest). The floor is never below the drift of the sides' own
blocks. Where no cell is known to be the same program, that is said, and the sides' drift alone is the floor; where a
side has too few processes to show what these differ by, it is what processes were seen to differ by, and nothing is
called the same.

Note [Modes of one run]: two modes that alternated are compared as the run's report compares them (`suite.stats`). Their
blocks are not independent: what a process has of its own is in all of its blocks. An interval over blocks took modes
for different, by 3 % and more, in one case of three where processes differ by 3 %.

Where Inductor tuned the kernels of the two runs otherwise, the ratio is one of two results of tuning and not of the
code: it is shown, has no verdict, and is in no mean (`suite.report.compare.Kernels`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from suite import stats as stats_within_run
from suite import stats_across_runs as stats
from suite.compare.sides import Side
from suite.compare.surroundings import STOCK_SOFTWARE, Difference, differences
from suite.errors import EncoreError, WrongUse
from suite.modes import MODES
from suite.report.compare import COMPARABLE, Kernels, TimeKind, against, compare_kernels
from suite.report.load import Run, cell_label, mode_order
from suite.report.provenance import of_run
from suite.schema import Block, Cell, Grouping, Status
from suite.stats import MARGIN, MINIMUM_PROCESSES, GeometricMean, Ratio, geometric_mean
from suite.stats import judge as judge_within_run

DEFAULT_THRESHOLD = 0.05
LEAST_CONTROLS = 3
"""Fewer cells that are the same program in both say little about the spread."""
FEW_PROCESSES_FLOOR = 0.06
"""Of cells with fewer than `MINIMUM_PROCESSES` processes: what those of one program were seen to differ by."""
_SHAPE = ("task", "batch", "dtype_policy", "device", "parameters", "input_bytes")
"""Fields of a cell that must agree: with another batch it is another workload."""


class PairKind(StrEnum):
    """What became of a pair. REGRESSION: slower beyond floor and threshold, or it passed and now fails. OTHER_KERNELS:
    a ratio without a verdict, because the kernels were tuned otherwise.
    """

    COMPARED = "compared"
    OTHER_KERNELS = "other kernels"
    REGRESSION = "regression"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, slots=True)
class Pair:
    """A row of both sides. `ratio` says how many times faster NEW is; `reason` why there is none, or what failed.

    `floor` is the |ratio - 1| below which no difference is called one. `remarks` are what a reader must know: other
    kernels, other bits. `base_us` and `new_us` are medians over all samples.
    """

    label: str
    base_mode: str
    new_mode: str
    outcome: PairKind
    ratio: stats.RatioAcrossRuns | None = None
    floor: float | None = None
    verdict: stats.Verdict | None = None
    base_us: float | None = None
    new_us: float | None = None
    reason: str | None = None
    kernels: Kernels | None = None
    remarks: tuple[str, ...] = ()

    @property
    def modes(self) -> str:
        return self.base_mode if self.base_mode == self.new_mode else f"{self.base_mode} to {self.new_mode}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything `encore compare` says, in the order it says it."""

    base: str
    new: str
    metric: TimeKind
    threshold: float
    differences: tuple[Difference, ...]
    remarks: tuple[str, ...]
    pairs: tuple[Pair, ...]
    geomeans: Mapping[str, GeometricMean]

    @property
    def regressions(self) -> tuple[Pair, ...]:
        return tuple(pair for pair in self.pairs if pair.outcome is PairKind.REGRESSION)


def compare_sides(
    base: Side, new: Side, metric: TimeKind = TimeKind.LATENCY, threshold: float = DEFAULT_THRESHOLD
) -> Comparison:
    """Compares two runs mode by mode, or one mode with another.

    Args:
        base: what was.
        new: what is asked about; ratios above 1 mean it is faster.
        metric: host time to completion, or time per iteration of iterations issued back to back.
        threshold: a regression is slower by more than this, 0.05 = 5 %, and by more than the floor.

    Raises:
        WrongUse: the threshold is not a share, one side names a mode and the other does not, both are the same, or
            there is not one pair of cells to compare; the message says why.
        EncoreError: a recorded time is not positive.
    """
    if not (math.isfinite(threshold) and 0 <= threshold < 1):
        raise WrongUse(f"--threshold {threshold:g} is not a share between 0 and 1; 0.05 is 5 %")
    if (base.mode is None) != (new.mode is None):
        named, other = (base, new) if base.mode else (new, base)
        raise WrongUse(
            f"{named.name} names a mode and {other.name} does not; compare runs, or modes: {other.name}:MODE"
        )
    same_run = _is_same_run(base, new)
    if same_run and base.mode == new.mode:
        raise WrongUse(f"{base.name} and {new.name} are the same; name two runs, or two modes of one: {base.name}:MODE")
    if base.run.device != new.run.device:
        raise WrongUse(
            f"{base.name} was measured on {base.run.device} and {new.name} on {new.run.device}: times of different "
            "devices say nothing about the code. Make a report of each: encore report RUN --out DIR"
        )
    differ = () if same_run else differences(base.run, new.run)
    remarks = [*_about_side("BASE", base), *([] if same_run else _about_side("NEW", new))]
    matched = list(_matched(base, new))
    if not any(ours and theirs for _, ours, theirs in matched):
        raise WrongUse(_nothing_in_common(base, new))
    known = {
        id(ours): _ratio(ours, theirs, metric, base.run if same_run else None)
        for _, ours, theirs in matched
        if _comparable(ours, theirs)
    }
    controls = {} if same_run else _controls(matched, known, differ)
    if not same_run:
        remarks.append(_about_controls(controls, differ))
    pairs = []
    for label, ours, theirs in matched:
        measured = known.get(id(ours)) if ours else None
        if ours is None or theirs is None or measured is None:
            pairs.append(_without_ratio(label, base, new, ours, theirs, metric))
        else:
            others = [distance for cell, distance in controls.items() if cell != id(ours)]
            pairs.append(_judged(label, ours, theirs, measured, _control_floor(others), threshold))
    return Comparison(base.name, new.name, metric, threshold, differ, tuple(remarks), tuple(pairs), _geomeans(pairs))


@dataclass(frozen=True, slots=True)
class _Measured:
    """A ratio with the floor that the two cells' own blocks give. `processes` is the lower number of the two cells;
    `verdict` that of the run's report, of modes that alternated."""

    ratio: stats.RatioAcrossRuns
    floor: float | None
    base_us: float
    new_us: float
    kernels: Kernels
    processes: int
    verdict: stats.Verdict | None = None

    @property
    def is_retuned(self) -> bool:
        return self.kernels in (Kernels.RETUNED, Kernels.OTHER)


def _is_same_run(base: Side, new: Side) -> bool:
    one, other = base.run.environment, new.run.environment
    return (one.run_id, one.created_at) == (other.run_id, other.created_at)


def _about_side(side: str, of: Side) -> list[str]:
    """That it is a smoke run, what is wrong with its files, and what was not run yet."""
    remarks = [f"{side} is a {warning}"] if (warning := of_run(of.run).warning) else []
    remarks += [f"{side}: {remark}" for remark in of.run.remarks]
    missing: dict[str, list[str]] = {}
    for workload, mode in of.missing:
        missing.setdefault(workload, []).append(mode)
    if missing:
        names = "; ".join(f"{workload} in {', '.join(modes)}" for workload, modes in missing.items())
        remarks.append(f"{side} is not finished; not run yet: {names}")
    return remarks


def _nothing_in_common(base: Side, new: Side) -> str:
    rows = [sorted({cell_label(cell) for cell in side.cells}) for side in (base, new)]
    modes = [sorted({cell.mode for cell in side.cells}, key=mode_order) for side in (base, new)]
    return (
        f"{base.name} and {new.name} have no cell in common: BASE has {', '.join(rows[0]) or 'no workload'} in "
        f"{', '.join(modes[0]) or 'no mode'}, NEW has {', '.join(rows[1]) or 'no workload'} in "
        f"{', '.join(modes[1]) or 'no mode'}. To compare two modes, name them: RUN:MODE"
    )


def _matched(base: Side, new: Side) -> Iterator[tuple[str, Cell | None, Cell | None]]:
    """(label, cell of BASE, cell of NEW) of every row and mode that either side has, by workload and mode."""
    by_key = [{(cell_label(cell), "" if side.mode else cell.mode): cell for cell in side.cells} for side in (base, new)]
    for key in sorted(by_key[0].keys() | by_key[1].keys(), key=lambda key: (key[0], mode_order(key[1]))):
        yield key[0], by_key[0].get(key), by_key[1].get(key)


def _shape_differences(ours: Cell, theirs: Cell) -> list[str]:
    pairs = ((name, getattr(ours, name), getattr(theirs, name)) for name in _SHAPE)
    return [
        f"{name.replace('_', ' ')} {old} in BASE, {now} in NEW"
        for name, old, now in pairs
        if old != now and (name not in ("parameters", "input_bytes") or None not in (old, now))
    ]


def _comparable(ours: Cell | None, theirs: Cell | None) -> bool:
    return (
        ours is not None
        and theirs is not None
        and ours.status is theirs.status is Status.PASS
        and not _shape_differences(ours, theirs)
    )


def _samples(blocks: Sequence[Block], metric: TimeKind) -> dict[tuple[int, int], list[float]]:
    """Samples by process and block."""

    def of(block: Block) -> list[float]:
        if metric is TimeKind.LATENCY:
            return block.host_us
        if metric is TimeKind.DEVICE:
            return block.device_us or []
        return [] if block.throughput_us is None else [block.throughput_us]

    return {(block.process, block.index): samples for block in blocks if (samples := of(block))}


def _ratio(ours: Cell | None, theirs: Cell | None, metric: TimeKind, one_run: Run | None) -> _Measured | None:
    """How many times faster NEW is. `one_run`: what both are of; only modes that alternated in it are paired."""
    if ours is None or theirs is None:
        return None
    sides = [_samples(cell.blocks, metric) for cell in (ours, theirs)]
    if not all(sides):
        return None
    base_us, new_us = (float(np.median([time for block in side.values() for time in block])) for side in sides)
    processes = min(len({process for process, _ in side}) for side in sides)
    if one_run is not None and (of := _within(one_run, ours, theirs, metric)) is not None:
        ratio = stats.RatioAcrossRuns(of.value, of.low, of.high, of.blocks, of.log_replicates)
        kernels = compare_kernels(theirs, ours, of.value)
        return _Measured(ratio, MARGIN, base_us, new_us, kernels, of.processes, judge_within_run(of))
    alternating = (
        one_run is not None
        and (ours.grouping, ours.group) == (theirs.grouping, theirs.group)
        and ours.grouping in (Grouping.TOGETHER, Grouping.HALVES)
    )
    if alternating:
        both = sorted(sides[0].keys() & sides[1].keys())
        reference, blocks = ([side[index] for index in both] for side in sides)
    else:
        reference, blocks = (list(side.values()) for side in sides)
    if not reference or not blocks:
        return None
    estimate, floor_of = (
        (stats.paired_ratio, stats.noise_floor) if alternating else (stats.unpaired_ratio, stats.drift_floor)
    )
    name = f"{cell_label(ours)} {ours.mode} {theirs.mode} {metric}"
    try:
        ratio = estimate(reference, blocks, seed=(zlib.crc32(name.encode()),))
        floors = [floor_of(reference), floor_of(blocks)]
    except ValueError as error:
        raise EncoreError(f"the recorded {metric} samples of {name} cannot be compared: {error}") from error
    known = [floor for floor in floors if floor is not None]
    floor = max(known) if len(known) == len(floors) else None
    verdict = stats.Verdict.AMBG if alternating else None
    kernels = compare_kernels(theirs, ours, ratio.value)
    return _Measured(ratio, floor, base_us, new_us, kernels, processes, verdict)


def _within(run: Run, ours: Cell, theirs: Cell, metric: TimeKind) -> Ratio | None:
    """The ratio by several processes of modes that alternated: see Note [Modes of one run].

    Where a mode ran again as the baseline of another, only the other's row has those blocks. So both rows are asked.
    """
    forth = against(run, theirs, ours.mode, metric)
    if forth.alternating:
        ratio = forth.ratio
    else:
        back = against(run, ours, theirs.mode, metric)
        ratio = stats_within_run.inverse(back.ratio) if back.alternating and back.ratio is not None else None
    return ratio if ratio is not None and ratio.processes > 1 else None


def _controls(
    matched: Sequence[tuple[str, Cell | None, Cell | None]],
    known: Mapping[int, _Measured | None],
    differ: Sequence[Difference],
) -> dict[int, float]:
    """Distances from 1, as |log ratio|, of cells that are the same program in both runs; by the cell of BASE."""
    if _other_programs(differ):
        return {}
    distances = {}
    for _, ours, theirs in matched:
        measured = known.get(id(ours)) if ours else None
        if ours is None or theirs is None or measured is None or measured.is_retuned or ours.mode != theirs.mode:
            continue
        if ours.mode in MODES and MODES[ours.mode].backend != "encore":
            distances[id(ours)] = abs(math.log(measured.ratio.value))
    return distances if len(distances) >= LEAST_CONTROLS else {}


def _other_programs(differ: Sequence[Difference]) -> list[str]:
    return [each.what for each in differ if each.what in (*STOCK_SOFTWARE, "device")]


def _control_floor(distances: Sequence[float]) -> float | None:
    """The 95th percentile, or the largest of few."""
    if not distances:
        return None
    return math.expm1(float(np.quantile(distances, stats.CONFIDENCE, method="higher")))


def _about_controls(controls: Mapping[int, float], differ: Sequence[Difference]) -> str:
    if controls:
        floor = _control_floor(list(controls.values())) or 0.0
        return (
            f"floor: {len(controls)} cells are the same program in both runs, and differ by up to {floor:.1%} "
            "(95th percentile); no smaller difference is called one"
        )
    reason = f"{', '.join(found)} differ" if (found := _other_programs(differ)) else "too few cells of stock modes"
    return f"floor: no cell is known to be the same program in both runs ({reason}); it is the runs' own drift alone"


def _judged(
    label: str, ours: Cell, theirs: Cell, measured: _Measured, control_floor: float | None, threshold: float
) -> Pair:
    few = measured.processes < MINIMUM_PROCESSES and control_floor is None
    floors = (measured.floor, control_floor, FEW_PROCESSES_FLOOR if few and measured.verdict is None else None)
    floor = None if measured.floor is None else max(each for each in floors if each is not None)
    verdict = measured.verdict or stats.judge(measured.ratio, floor)
    if few and verdict is stats.Verdict.SAME:
        verdict = stats.Verdict.AMBG
    slower = verdict is stats.Verdict.SLOW and measured.ratio.value < 1 / (1 + threshold)
    return Pair(
        label,
        ours.mode,
        theirs.mode,
        PairKind.OTHER_KERNELS if measured.is_retuned else PairKind.REGRESSION if slower else PairKind.COMPARED,
        measured.ratio,
        floor,
        None if measured.is_retuned else verdict,
        measured.base_us,
        measured.new_us,
        kernels=measured.kernels,
        remarks=_remarks(ours, theirs, measured.kernels),
    )


def _remarks(ours: Cell, theirs: Cell, ran: Kernels) -> tuple[str, ...]:
    remarks = [] if ran in COMPARABLE and ran is not Kernels.GENERATED else [f"kernels: {ran.value}"]
    checked = [cell.correctness for cell in (ours, theirs) if cell.correctness and cell.correctness.deterministic]
    if len(checked) == 2 and ours.seed == theirs.seed and checked[0].digests != checked[1].digests:
        remarks.append("other bits")
    return tuple(remarks)


def _without_ratio(label: str, base: Side, new: Side, ours: Cell | None, theirs: Cell | None, metric: TimeKind) -> Pair:
    either = ours or theirs
    assert either is not None, "a row is matched because a side has it"
    modes = [side.mode or (cell or either).mode for side, cell in ((base, ours), (new, theirs))]
    outcome = PairKind.NOT_COMPARABLE
    if ours is None or theirs is None:
        here, lacking, mode = ("BASE", new, modes[1]) if theirs is None else ("NEW", base, modes[0])
        planned = (either.workload, mode) in lacking.missing
        reason = f"only in {here}{', not run yet in the other' if planned else ''}"
    elif shape := _shape_differences(ours, theirs):
        reason = "; ".join(shape)
    elif ours.status is Status.PASS and theirs.status is not Status.PASS:
        outcome, reason = PairKind.REGRESSION, f"passed in BASE, {theirs.status.value} in NEW"
    elif ours.status is not Status.PASS:
        reason = f"{ours.status.value} in BASE, {theirs.status.value} in NEW"
    else:
        reason = f"no {metric.value} samples"
    return Pair(label, modes[0], modes[1], outcome, reason=reason)


def _geomeans(pairs: Sequence[Pair]) -> dict[str, GeometricMean]:
    """Of each mode over the workloads that have a ratio of the same kernels, or of kernels nobody recorded."""
    ratios: dict[str, list[stats.RatioAcrossRuns]] = {}
    for pair in pairs:
        if pair.ratio is not None and pair.outcome is not PairKind.OTHER_KERNELS:
            ratios.setdefault(pair.modes, []).append(pair.ratio)
    return {modes: geometric_mean(found) for modes, found in ratios.items()}
