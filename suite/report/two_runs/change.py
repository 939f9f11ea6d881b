"""Estimate how much a ratio within one run differs from the same ratio within another run, with its interval.

Note [Difference in differences]: two runs were never alive together, so a difference of their times is also one of
their hosts, clocks and neighbours. Each run therefore gives the ratio of a mode over a baseline of the same run, whose
blocks alternated with it, and what is compared are these ratios. What slows a whole run cancels.

Note [Both intervals]: processes of one program differ, and every process gives one log ratio. The change is the
difference of the two means, and its variance is that of one process times (1 / processes of BASE + 1 / processes of
NEW). The variance of one process is pooled over both runs and over all ratios of a workload, as within a run (Note
[Processes] in `suite.results.stats`), and is never smaller than the ratio's own. So two processes on one side and one
on the other are enough for an interval, and one on each side is not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from suite.measure.modes import EAGER_MODE, GRAPH_MODE, REFERENCE_MODE
from suite.report.compare import (
    Kernels,
    TimeKind,
    baselines,
    compare_kernels,
    has_settled,
    ratios_by_process,
)
from suite.report.runs import Run, cell_label
from suite.results import stats
from suite.results.schema import Status
from suite.results.stats import CONFIDENCE, Spread

LogRatios = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Change:
    """Hold how many times faster NEW is than BASE, with its 95 % interval [low, high].

    `count` is the number of ratios that it is a mean of. `error` is the standard error of log(value), and `freedom`
    the degrees of freedom that it was estimated with; both are needed for means over workloads.
    """

    value: float
    low: float
    high: float
    error: float
    freedom: float
    count: int = 1

    @property
    def half_width(self) -> float:
        """Return half of the interval, as a logarithm."""
        return math.log(self.high / self.low) / 2


def own_variance(*sides: LogRatios) -> tuple[float, int]:
    """Return the variance of one process's log ratio around its side's mean, with its degrees of freedom."""
    freedom = sum(len(side) - 1 for side in sides)
    squares = sum(float(np.sum((side - side.mean()) ** 2)) for side in sides)
    return (squares / freedom if freedom else 0.0), freedom


def change_between(base: LogRatios, new: LogRatios, spread: Spread) -> Change | None:
    """Return the change from the log ratios of BASE's processes to those of NEW's; None if nothing tells its error."""
    own, degrees = own_variance(base, new)
    freedom = degrees + spread.freedom
    if not freedom:
        return None
    variance = max(own, (degrees * own + spread.freedom * spread.variance) / freedom)
    error = math.sqrt(variance * (1 / len(base) + 1 / len(new)))
    return _with_interval(float(new.mean() - base.mean()), error, freedom, 1)


def mean_change(changes: Sequence[Change]) -> Change:
    """Return the geometric mean of independent changes. Its degrees of freedom are those of F. E. Satterthwaite, "An
    Approximate Distribution of Estimates of Variance Components", Biometrics Bulletin 2(6), 1946.

    Raises:
        ValueError: there is no change.
    """
    if not changes:
        raise ValueError("a geometric mean needs at least one change")
    squares = [each.error**2 for each in changes]
    total = math.fsum(squares)
    freedom = (
        total**2 / math.fsum(square**2 / each.freedom for square, each in zip(squares, changes, strict=True))
        if (total)
        else math.fsum(each.freedom for each in changes)
    )
    mean = math.fsum(math.log(each.value) for each in changes) / len(changes)
    return _with_interval(mean, math.sqrt(total) / len(changes), freedom, len(changes))


def _with_interval(log_change: float, error: float, freedom: float, count: int) -> Change:
    reach = error * float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
    low, high = math.exp(max(log_change - reach, -700)), math.exp(min(log_change + reach, 700))
    return Change(math.exp(log_change), low, high, error, freedom, count)


BASELINES = (GRAPH_MODE, REFERENCE_MODE, EAGER_MODE)
"""In-run baselines, the best first: `graph` depends least on the host."""
ONE_PROCESS = "one process in each run, and nothing tells how much processes differ"
NOT_SETTLED = "not settled when it was timed"
OTHER_KERNELS = "other kernels than"


@dataclass(frozen=True, slots=True)
class Found:
    """Hold a change with what it was made from: the baseline and the ratios over it in BASE and in NEW.

    `reason` says why there is no change.
    """

    change: Change | None
    baseline: str | None = None
    ratios: tuple[float, ...] = ()
    reason: str | None = None


class WithinRuns:
    """Hold log ratios of all rows of two runs over baselines of the same run, each computed once."""

    def __init__(self, base: Run, new: Run, metric: TimeKind) -> None:
        self._rows = [{(cell_label(cell), cell.mode): cell for cell in run.cells} for run in (base, new)]
        self._metric = metric
        self._of_run = functools.cache(self._ratios_of_run)
        self._spread = functools.cache(self._spread_of_both)

    def change(self, label: str, mode: str) -> Found:
        """Return the change of a row in this mode, over the first baseline that both runs have.

        Raises:
            EncoreError: a recorded time is not positive.
        """
        whys = []
        for baseline in BASELINES[BASELINES.index(mode) + 1 :] if mode in BASELINES else BASELINES:
            base, new = self._of_run(0, label, mode, baseline), self._of_run(1, label, mode, baseline)
            if isinstance(base, str) or isinstance(new, str):
                named = {name: side for side, name in ((base, "BASE"), (new, "NEW")) if isinstance(side, str)}
                whys += (
                    [f"{base} in both"]
                    if len(named) == 2 and len(set(named.values())) == 1
                    else [f"{why} in {name}" for name, why in named.items()]
                )
                continue
            change = change_between(base, new, self._spread(label))
            ratios = (math.exp(base.mean()), math.exp(new.mean()))
            return Found(change, baseline, ratios, None if change else ONE_PROCESS)
        return Found(None, reason="; ".join(dict.fromkeys(whys)) or "other modes are compared with it")

    def _ratios_of_run(self, side: int, label: str, mode: str, baseline: str) -> LogRatios | str:
        """Return the log ratios of the processes of one run, or why there are none."""
        cell, reference = self._rows[side].get((label, mode)), self._rows[side].get((label, baseline))
        if cell is None or reference is None:
            return f"{baseline} was not measured"
        if not cell.status is reference.status is Status.PASS:
            return f"{baseline}: {reference.status.value}"
        if not (has_settled(cell) and has_settled(reference)):
            return NOT_SETTLED
        ratios = ratios_by_process(cell, reference, self._metric)
        if ratios is None:
            return f"no {self._metric.value} samples"
        if compare_kernels(cell, reference) is Kernels.RETUNED:
            return f"{OTHER_KERNELS} {baseline}"
        return ratios

    def _spread_of_both(self, label: str) -> stats.Spread:
        """Return what all ratios of a workload tell of how much processes differ: see Note [Both intervals]."""
        variances, modes = [], set()
        for cell in (cell for (name, _), cell in self._rows[0].items() if name == label):
            for baseline in baselines(cell):
                found = [self._of_run(side, label, cell.mode, baseline) for side in (0, 1)]
                sides = [side for side in found if not isinstance(side, str)]
                if len(sides) == 2 and sum(map(len, sides)) > 2:
                    variances.append(own_variance(*sides))
                    modes |= {cell.mode, baseline}
        return stats.spread_of_variances(variances, len(modes))
