"""Pair rows of two runs, and decide whether NEW is slower.

Note [Decision]: a row is a regression if the whole 95 % interval of its change is slower by more than the threshold, if
the same kernels take longer by more than it, or if it passed and now fails. A mode's geometric mean over workloads is
more precise than any row: it is a regression if its whole interval is below 1 and it is slower by more than half of the
threshold. `tests/suite/report/two_runs/test_recorded_runs.py` has the rates of wrong and missed findings on recorded
runs.

Note [Controls]: modes without Encore are the same program in both runs if PyTorch, driver and GPU are equal. Their
changes are shown, and are no findings: they show how much two runs of an unchanged program differ.

Note [Kernels]: Inductor may tune kernels again in every run, and a time then compares two results of tuning. Within a
run a mode and its baseline run the same kernels, so the ratio of the two stays comparable. Where both runs have the
same kernels, the sums of kernel times are compared as well, relative to those of the controls; on recorded runs they
agree within 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from suite.measure.kernels import difference
from suite.measure.modes import GRAPH_MODE, MODES, REFERENCE_MODE
from suite.report.compare import SAMPLES, TimeKind
from suite.report.provenance import facts, of_run
from suite.report.runs import Run, cell_label, load_runs, mode_order
from suite.report.two_runs.change import (
    BASELINES,
    NOT_SETTLED,
    ONE_PROCESS,
    OTHER_KERNELS,
    WithinRuns,
)
from suite.results.errors import EXIT_FINDING, EXIT_OK, EXIT_UNDECIDED, WrongUse
from suite.results.schema import Cell, Status
from suite.results.stats import Ratio, geometric_mean
from suite.results.store import find_run


@dataclass(frozen=True, slots=True)
class Side:
    """Hold one side of a comparison: a run, and the user's name for it."""

    name: str
    run: Run


def find_side(names: str) -> Side:
    """Find the run of this name or folder; of several names separated by commas, such as shards, join the runs.

    Raises:
        WrongUse: there is no such run, or the runs do not belong together; the message names the nearest ones.
        InvalidResults: a file of a run has wrong fields.
    """
    return Side(names, load_runs([find_run(name) for name in names.split(",")]))


STOCK_SOFTWARE = ("PyTorch", "CUDA of PyTorch", "cuDNN", "driver", "Python", "package triton")
"""Software that must be equal for a mode without Encore to be the same program in both runs."""
_NOT_SETTINGS = ("workloads", "modes", "shard")


class Difference(NamedTuple):
    """Describe one difference of two runs, as text."""

    what: str
    base: str
    new: str


def differences(base: Run, new: Run) -> tuple[Difference, ...]:
    """List all differences in the records of two runs, the most important first."""
    ours, theirs = _facts(base), _facts(new)
    names = [*ours, *(name for name in theirs if name not in ours)]
    pairs = ((name, ours.get(name, "none"), theirs.get(name, "none")) for name in names)
    return tuple(Difference(*pair) for pair in pairs if pair[1] != pair[2])


def _facts(run: Run) -> dict[str, str]:
    environment = run.environment
    settings = {f"setting {name}": value for name, value in environment.settings.items() if name not in _NOT_SETTINGS}
    packages = {f"package {name}": value for name, value in environment.packages.items()}
    return facts(environment) | {name: str(value) for name, value in (settings | packages).items()}


DEFAULT_THRESHOLD = 0.05
LEAST_IN_MEAN = 3
"""Number of workloads that a geometric mean needs for a verdict."""
_MOST_MORE = 10
"""Largest factor by which advice increases the number of processes."""
_SHAPE = ("task", "batch", "dtype_policy", "device", "parameters", "input_bytes")
"""Fields of a row that must be equal; a different batch, for example, is a different workload."""


class Outcome(StrEnum):
    """List the verdicts on NEW, for a row or for a mode's mean."""

    REGRESSION = "regression"
    FASTER = "faster"
    SAME = "same"
    UNDECIDED = "undecided"
    CONTROL = "same program"
    NOT_COMPARABLE = "not comparable"


DECIDED = (Outcome.REGRESSION, Outcome.FASTER, Outcome.SAME)


@dataclass(frozen=True, slots=True)
class Pair:
    """Hold a row of both sides. `change` is the speed-up of NEW, by its ratio over `baseline` in its run.

    `ratios` are these ratios, of BASE and of NEW. `kernel_change` is the speed-up of the same kernels. `base_us` and
    `new_us` are medians over all samples. `reason`: why nothing is decided, or which side failed.
    """

    label: str
    mode: str
    outcome: Outcome
    baseline: str | None = None
    ratios: tuple[float, ...] = ()
    change: Ratio | None = None
    kernel_change: float | None = None
    base_us: float | None = None
    new_us: float | None = None
    reason: str | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mean:
    """Hold the geometric mean of a mode's changes over workloads, and its verdict."""

    change: Ratio
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hold the result of `encore compare`. `means` are by mode; `advice` is on how to decide undecided rows."""

    base: str
    new: str
    metric: TimeKind
    threshold: float
    differences: tuple[Difference, ...]
    remarks: tuple[str, ...]
    pairs: tuple[Pair, ...]
    means: Mapping[str, Mean]
    advice: tuple[str, ...]

    @property
    def regressions(self) -> tuple[str, ...]:
        """Return the names of the rows, and of the modes in the mean, that are slower or fail now."""
        rows = [f"{pair.label} {pair.mode}" for pair in self.pairs if pair.outcome is Outcome.REGRESSION]
        means = [f"{mode} in the mean" for mode, mean in self.means.items() if mean.outcome is Outcome.REGRESSION]
        return (*means, *rows)

    @property
    def exit_code(self) -> int:
        """Return 1 if there is a regression, 3 if nothing was decided, otherwise 0."""
        if self.regressions:
            return EXIT_FINDING
        outcomes = [*(pair.outcome for pair in self.pairs), *(mean.outcome for mean in self.means.values())]
        return EXIT_OK if any(outcome in DECIDED for outcome in outcomes) else EXIT_UNDECIDED


def compare_sides(
    base: Side, new: Side, metric: TimeKind = TimeKind.LATENCY, threshold: float = DEFAULT_THRESHOLD
) -> Comparison:
    """Compare two runs mode by mode, and decide.

    Args:
        base: the older side.
        new: the side in question; changes above 1 mean that it is faster.
        metric: time of one iteration to completion, or per iteration of iterations issued back to back.
        threshold: smallest slowdown of a row that is a regression, 0.05 = 5 %; see Note [Decision].

    Raises:
        WrongUse: the threshold is not a share, both runs are the same, the devices differ, or no row is in both; the
            message says what to do.
        EncoreError: a recorded time is not positive.
    """
    if not (math.isfinite(threshold) and 0 <= threshold < 1):
        raise WrongUse(f"--threshold {threshold:g} is not a share between 0 and 1; 0.05 is 5 %")
    if _identity(base.run) == _identity(new.run):
        raise WrongUse(f"{base.name} and {new.name} are the same run; name two")
    if base.run.device != new.run.device:
        raise WrongUse(
            f"{base.name} was measured on {base.run.device} and {new.name} on {new.run.device}: times of different "
            "devices say nothing about the code. Make a report of each: encore report RUN --out DIR"
        )
    matched = list(_matched(base, new))
    if not any(ours and theirs for _, ours, theirs in matched):
        raise WrongUse(_nothing_in_common(base, new))
    differ = differences(base.run, new.run)
    other_programs = [each.what for each in differ if each.what in STOCK_SOFTWARE]
    controls = {mode for mode in MODES if not other_programs and not MODES[mode].is_encores}
    drift = [_kernel_change(ours, theirs) for _, ours, theirs in matched if ours and theirs and ours.mode in controls]
    kernel_drift = median([each for each in drift if each is not None] or [1.0])
    within = WithinRuns(base.run, new.run, metric)
    pairs = [
        _pair(within, ours, theirs, threshold, kernel_drift, control=ours.mode in controls)
        if ours and theirs and _comparable(ours, theirs)
        else _without_ratio(label, base, new, ours, theirs)
        for label, ours, theirs in matched
    ]
    means = _means(pairs, threshold)
    remarks = [*_about_side("BASE", base), *_about_side("NEW", new)]
    if other_programs:
        remarks.append(f"{', '.join(other_programs)} differ, so no mode is known to be the same program in both runs")
    return Comparison(
        base.name, new.name, metric, threshold, differ, tuple(remarks), tuple(pairs), means, _advice(pairs, threshold)
    )


def _pair(
    within: WithinRuns, ours: Cell, theirs: Cell, threshold: float, kernel_drift: float, *, control: bool
) -> Pair:
    """Compare a row of BASE with that of NEW, which both passed. `control`: see Note [Controls]."""
    label = cell_label(ours)
    found = within.change(label, ours.mode)
    outcome, reason = _outcome(found.change, threshold), found.reason
    kernels = _kernel_change(ours, theirs)
    kernels = kernels and kernels / kernel_drift
    if control:
        outcome = Outcome.CONTROL
    elif kernels is not None and kernels < 1 / (1 + threshold):
        outcome, reason = Outcome.REGRESSION, f"the same kernels take {1 / kernels - 1:.0%} longer"
    base_us, new_us = (_median_us(cell, within.metric) for cell in (ours, theirs))
    return Pair(
        label, ours.mode, outcome, found.baseline, found.ratios, found.change, kernels, base_us, new_us,
        reason,
        _remarks(ours, theirs),
    )  # fmt: skip


def _outcome(change: Ratio | None, threshold: float) -> Outcome:
    """Judge a row by Note [Decision]. SAME: the whole interval is within the threshold."""
    if change is None:
        return Outcome.UNDECIDED
    slower, faster = 1 / (1 + threshold), 1 + threshold
    if change.high < slower:
        return Outcome.REGRESSION
    if change.low > faster:
        return Outcome.FASTER
    return Outcome.SAME if slower <= change.low and change.high <= faster else Outcome.UNDECIDED


def _means(pairs: Sequence[Pair], threshold: float) -> dict[str, Mean]:
    """Return the mean of each mode over the workloads that have a change, judged by Note [Decision]."""
    changes: dict[str, list[Ratio]] = {}
    controls = {pair.mode for pair in pairs if pair.outcome is Outcome.CONTROL}
    for pair in pairs:
        if pair.change is not None:
            changes.setdefault(pair.mode, []).append(pair.change)
    found = {}
    for mode, of_mode in changes.items():
        mean = geometric_mean(of_mode)
        outcome = _outcome(mean, threshold)
        if mean.high < 1 and mean.value < 1 / (1 + threshold / 2):
            outcome = Outcome.REGRESSION
        elif mean.low > 1 and mean.value > 1 + threshold / 2:
            outcome = Outcome.FASTER
        if len(of_mode) < LEAST_IN_MEAN:
            outcome = Outcome.UNDECIDED
        found[mode] = Mean(mean, Outcome.CONTROL if mode in controls else outcome)
    return found


def _advice(pairs: Sequence[Pair], threshold: float) -> tuple[str, ...]:
    """Return advice on how to decide undecided rows."""
    undecided = [pair for pair in pairs if pair.outcome is Outcome.UNDECIDED]
    if not undecided and not any(pair.outcome in DECIDED for pair in pairs):
        return ("The runs share no mode of Encore's that passed in both: measure one, as --modes graph,encore.",)
    advice = []
    if wide := [pair.change.half_width() / math.log1p(threshold) for pair in undecided if pair.change and threshold]:
        more = (2 * median(wide)) ** 2  # the width of an interval scales with 1 / sqrt(processes)
        processes = f"measure both runs with about {max(more, 1.5):.1f} times as many processes (--processes), "
        advice.append(
            f"{_rows(len(wide))} an interval too wide for {threshold:.0%}: {processes if more <= _MOST_MORE else ''}"
            "use a quiet host, or give a larger --threshold."
        )
    for words, what in (
        (ONE_PROCESS, "one process in each run: measure with --processes 3."),
        (
            f"{BASELINES[0]} was not",
            f"no common baseline: measure with --modes {REFERENCE_MODE},{GRAPH_MODE},MODE.",
        ),
        (NOT_SETTLED, "no ratio, because Encore had not settled: measure again, with more time (--timeout)."),
        (OTHER_KERNELS, "other kernels than the baseline within a run: measure that run again."),
    ):
        if found := sum(words in (pair.reason or "") for pair in undecided):
            advice.append(f"{_rows(found)} {what}")
    return tuple(advice)


def _rows(count: int) -> str:
    return f"{count} row{'s have' if count != 1 else ' has'}"


def _kernel_change(ours: Cell, theirs: Cell) -> float | None:
    """Return the speed-up of the kernels of NEW's row; None if the two run different kernels."""
    before, after = ours.metrics, theirs.metrics
    if not (before and after and before.kernels and after.kernels and before.kernel_time_us and after.kernel_time_us):
        return None
    found = difference(before.kernels, after.kernels)
    return None if found.retuned or found.generated else before.kernel_time_us / after.kernel_time_us


def _median_us(cell: Cell, metric: TimeKind) -> float | None:
    samples = [time for block in cell.blocks for time in SAMPLES[metric](block)]
    return median(samples) if samples else None


def _identity(run: Run) -> tuple[str, str]:
    return run.environment.run_id, run.environment.created_at


def _about_side(side: str, of: Side) -> list[str]:
    """Return remarks on a smoke run, errors in its files, and missing cells."""
    remarks = [f"{side} is a {warning}"] if (warning := of_run(of.run).warning) else []
    remarks += [f"{side}: {remark}" for remark in of.run.remarks]
    missing: dict[str, list[str]] = {}
    for workload, mode in of.run.missing:
        missing.setdefault(workload, []).append(mode)
    if missing:
        names = "; ".join(f"{workload} in {', '.join(modes)}" for workload, modes in missing.items())
        remarks.append(f"{side} is not finished; not run yet: {names}")
    return remarks


def _nothing_in_common(base: Side, new: Side) -> str:
    rows = [sorted({cell_label(cell) for cell in side.run.cells}) for side in (base, new)]
    modes = [sorted({cell.mode for cell in side.run.cells}, key=mode_order) for side in (base, new)]
    return (
        f"{base.name} and {new.name} have no row in common: BASE has {', '.join(rows[0]) or 'no workload'} in "
        f"{', '.join(modes[0]) or 'no mode'}, NEW has {', '.join(rows[1]) or 'no workload'} in "
        f"{', '.join(modes[1]) or 'no mode'}"
    )


def _matched(base: Side, new: Side) -> Iterator[tuple[str, Cell | None, Cell | None]]:
    """Yield (label, row of BASE, row of NEW) for every workload and mode that either side has, in their order."""
    by_key = [{(cell_label(cell), cell.mode): cell for cell in side.run.cells} for side in (base, new)]
    for key in sorted(by_key[0].keys() | by_key[1].keys(), key=lambda key: (key[0], mode_order(key[1]))):
        yield key[0], by_key[0].get(key), by_key[1].get(key)


def _shape_differences(ours: Cell, theirs: Cell) -> list[str]:
    pairs = ((name, getattr(ours, name), getattr(theirs, name)) for name in _SHAPE)
    return [
        f"{name.replace('_', ' ')} {old} in BASE, {now} in NEW"
        for name, old, now in pairs
        if old != now and (name not in ("parameters", "input_bytes") or None not in (old, now))
    ]


def _comparable(ours: Cell, theirs: Cell) -> bool:
    return ours.status is theirs.status is Status.PASS and not _shape_differences(ours, theirs)


def _remarks(ours: Cell, theirs: Cell) -> tuple[str, ...]:
    checked = [cell.correctness for cell in (ours, theirs) if cell.correctness and cell.correctness.deterministic]
    other_bits = len(checked) == 2 and ours.seed == theirs.seed and checked[0].digests != checked[1].digests
    return ("other bits",) if other_bits else ()


def _without_ratio(label: str, base: Side, new: Side, ours: Cell | None, theirs: Cell | None) -> Pair:
    either = ours or theirs
    assert either is not None, "a row is matched because a side has it"
    outcome = Outcome.NOT_COMPARABLE
    if ours is None or theirs is None:
        here, lacking = ("BASE", new) if theirs is None else ("NEW", base)
        planned = (either.workload, either.mode) in lacking.run.missing
        reason = f"only in {here}{', not run yet in the other' if planned else ''}"
    elif shape := _shape_differences(ours, theirs):
        reason = "; ".join(shape)
    elif ours.status is Status.PASS:
        outcome, reason = Outcome.REGRESSION, f"passed in BASE, {theirs.status.value} in NEW"
    else:
        reason = f"{ours.status.value} in BASE, {theirs.status.value} in NEW"
    return Pair(label, either.mode, outcome, reason=reason)
