"""How much a ratio within one run differs from the same ratio within another run, with its interval.

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

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from suite.results.stats import CONFIDENCE, Spread

LogRatios = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Change:
    """How many times faster NEW is than BASE, with its 95 % interval [low, high].

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
        """Half of the interval, as a logarithm."""
        return math.log(self.high / self.low) / 2


def own_variance(*sides: LogRatios) -> tuple[float, int]:
    """Return the variance of one process's log ratio around its side's mean, with its degrees of freedom."""
    freedom = sum(len(side) - 1 for side in sides)
    squares = sum(float(np.sum((side - side.mean()) ** 2)) for side in sides)
    return (squares / freedom if freedom else 0.0), freedom


def change_between(base: LogRatios, new: LogRatios, spread: Spread) -> Change | None:
    """Return the change from the log ratios of BASE's processes to those of NEW's; None if nothing tells its error."""
    return _estimate(float(new.mean() - base.mean()), (base, new), spread)


def change_within(new_over_base: LogRatios, spread: Spread) -> Change | None:
    """Return the change between two modes of one run, from their log ratios by process; None as `change_between`."""
    return _estimate(float(new_over_base.mean()), (new_over_base,), spread)


def _estimate(log_change: float, sides: Sequence[LogRatios], spread: Spread) -> Change | None:
    own, degrees = own_variance(*sides)
    freedom = degrees + spread.freedom
    if not freedom:
        return None
    variance = max(own, (degrees * own + spread.freedom * spread.variance) / freedom)
    return _with_interval(log_change, math.sqrt(variance * sum(1 / len(side) for side in sides)), freedom, 1)


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
