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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from suite.measure.kernels import difference
from suite.measure.modes import GRAPH_MODE, MODES, REFERENCE_MODE
from suite.report.cell_tables import host_median_us
from suite.report.provenance import facts, of_run, run_names
from suite.report.runs import Run, cell_label, mode_order
from suite.report.two_runs.change import (
    BASELINES,
    NOT_SETTLED,
    ONE_PROCESS,
    OTHER_KERNELS,
    WithinRuns,
)
from suite.results.errors import EXIT_FINDING, EXIT_OK, EXIT_UNDECIDED, WrongUse
from suite.results.schema import Cell, Environment, Status
from suite.results.stats import Ratio, geometric_mean

STOCK_SOFTWARE = ("PyTorch", "CUDA of PyTorch", "cuDNN", "driver", "Python", "package triton")
"""Software that must be equal for a mode without Encore to be the same program in both runs."""
_NOT_SETTINGS = ("workloads", "modes", "shard")


def differences(base: Run, new: Run) -> list[dict[str, str]]:
    """List all differences in the records of two runs, the most important first: "what", and its text in each."""
    ours, theirs = _facts(base.environment), _facts(new.environment)
    named = ((name, ours.get(name, "none"), theirs.get(name, "none")) for name in ours | theirs)
    return [{"what": name, "base": old, "new": now} for name, old, now in named if old != now]


def _facts(environment: Environment) -> dict[str, str]:
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
    threshold: float
    differences: Sequence[Mapping[str, str]]
    remarks: Sequence[str]
    pairs: Sequence[Pair]
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


def compare_runs(base: Run, new: Run, threshold: float = DEFAULT_THRESHOLD) -> Comparison:
    """Compare two runs mode by mode, and decide.

    Args:
        base: the older run, or several joined.
        new: the run in question; changes above 1 mean that it is faster.
        threshold: smallest slowdown of a row that is a regression, 0.05 = 5 %; see Note [Decision].

    Raises:
        WrongUse: the threshold is not a share, both runs are the same, the devices differ, or no row is in both; the
            message says what to do.
    """
    if not (math.isfinite(threshold) and 0 <= threshold < 1):
        raise WrongUse(f"--threshold {threshold:g} is not a share between 0 and 1; 0.05 is 5 %")
    names = [", ".join(run_names(run)) for run in (base, new)]
    if base.environment == new.environment:
        raise WrongUse(f"{names[0]} is BASE and NEW; name two runs")
    if base.device != new.device:
        raise WrongUse(
            f"{names[0]} was measured on {base.device} and {names[1]} on {new.device}: times of different devices say "
            "nothing about the code. Make a report of each: encore report RUN --out DIR"
        )
    sides = [{(cell_label(cell), cell.mode): cell for cell in run.cells} for run in (base, new)]
    if not sides[0].keys() & sides[1].keys():
        raise WrongUse(f"{names[0]} and {names[1]} have no row in common: {_named('BASE', base)}, {_named('NEW', new)}")
    keys = sorted(sides[0].keys() | sides[1].keys(), key=lambda key: (key[0], mode_order(key[1])))
    matched = [(label, sides[0].get((label, mode)), sides[1].get((label, mode))) for label, mode in keys]
    differ = differences(base, new)
    other_programs = [each["what"] for each in differ if each["what"] in STOCK_SOFTWARE]
    controls = {mode for mode in MODES if not other_programs and not MODES[mode].is_encores}
    drift = [_kernel_change(ours, theirs) for _, ours, theirs in matched if ours and theirs and ours.mode in controls]
    kernel_drift = median([each for each in drift if each is not None] or [1.0])
    within = WithinRuns(base.cells, new.cells)
    pairs = [
        _pair(within, ours, theirs, threshold, kernel_drift, control=ours.mode in controls)
        if ours and theirs and ours.status is theirs.status is Status.PASS and not _shape_differences(ours, theirs)
        else _without_ratio(label, base, new, ours, theirs)
        for label, ours, theirs in matched
    ]
    remarks = [*_about_run("BASE", base), *_about_run("NEW", new)]
    if other_programs:
        remarks.append(f"{', '.join(other_programs)} differ, so no mode is known to be the same program in both runs")
    means, advice = _means(pairs, threshold), _advice(pairs, threshold)
    return Comparison(names[0], names[1], threshold, differ, remarks, pairs, means, advice)


def _pair(
    within: WithinRuns, ours: Cell, theirs: Cell, threshold: float, kernel_drift: float, *, control: bool
) -> Pair:
    """Compare a row of BASE with that of NEW, which both passed. `control`: see Note [Controls]."""
    label = cell_label(ours)
    change, baseline, ratios, reason = within.change(label, ours.mode)
    outcome = _outcome(change, threshold)
    kernels = _kernel_change(ours, theirs)
    kernels = kernels and kernels / kernel_drift
    if control:
        outcome = Outcome.CONTROL
    elif kernels is not None and kernels < 1 / (1 + threshold):
        outcome, reason = Outcome.REGRESSION, f"the same kernels take {1 / kernels - 1:.0%} longer"
    base_us, new_us = (host_median_us(cell) for cell in (ours, theirs))
    checked = [cell.correctness for cell in (ours, theirs) if cell.correctness and cell.correctness.deterministic]
    other_bits = len(checked) == 2 and ours.seed == theirs.seed and checked[0].digests != checked[1].digests
    remarks = ("other bits",) if other_bits else ()
    return Pair(label, ours.mode, outcome, baseline, ratios, change, kernels, base_us, new_us, reason, remarks)


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
            f"{BASELINES[0]}: not run",
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


def _about_run(side: str, run: Run) -> list[str]:
    """Return remarks on a smoke run, errors in its files, and missing cells."""
    remarks = [f"{side} is a {warning}"] if (warning := of_run(run).warning) else []
    remarks += [f"{side}: {remark}" for remark in run.remarks]
    missing: dict[str, list[str]] = {}
    for workload, mode in run.missing:
        missing.setdefault(workload, []).append(mode)
    names = "; ".join(f"{workload} in {', '.join(modes)}" for workload, modes in missing.items())
    return [*remarks, f"{side} is not finished; not run yet: {names}"] if names else remarks


def _named(side: str, run: Run) -> str:
    modes = sorted({cell.mode for cell in run.cells}, key=mode_order)
    return f"{side} has {', '.join(run.labels) or 'no workload'} in {', '.join(modes) or 'no mode'}"


def _shape_differences(ours: Cell, theirs: Cell) -> list[str]:
    pairs = ((name, getattr(ours, name), getattr(theirs, name)) for name in _SHAPE)
    return [
        f"{name.replace('_', ' ')} {old} in BASE, {now} in NEW"
        for name, old, now in pairs
        if old != now and (name not in ("parameters", "input_bytes") or None not in (old, now))
    ]


def _without_ratio(label: str, base: Run, new: Run, ours: Cell | None, theirs: Cell | None) -> Pair:
    either = ours or theirs
    assert either is not None, "a row is matched because a side has it"
    outcome = Outcome.NOT_COMPARABLE
    if ours is None or theirs is None:
        here, lacking = ("BASE", new) if theirs is None else ("NEW", base)
        planned = (either.workload, either.mode) in lacking.missing
        reason = f"only in {here}{', not run yet in the other' if planned else ''}"
    elif shape := _shape_differences(ours, theirs):
        reason = "; ".join(shape)
    elif ours.status is Status.PASS:
        outcome, reason = Outcome.REGRESSION, f"passed in BASE, {theirs.status.value} in NEW"
    else:
        reason = f"{ours.status.value} in BASE, {theirs.status.value} in NEW"
    return Pair(label, either.mode, outcome, reason=reason)
