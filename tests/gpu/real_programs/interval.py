"""An interval for the median of paired differences that supposes no shape of the noise: Wilcoxon's signed ranks.

The estimate is the median of all means of two differences (Hodges and Lehmann 1963), and the interval is bounded by
order statistics of these means (Tukey; in Hollander, Wolfe and Chicken, "Nonparametric Statistical Methods", 3.3). It
supposes that differences are independent and symmetric about their median, which a random order within each pair brings
about. A few differences that are far off, whatever made them so, move it hardly at all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

EXACT_UP_TO = 60
"""Differences for which the distribution of the ranks is computed; beyond, its normal approximation is used."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, and bounds that the true value lies outside of with a probability of at most `error` per side."""

    estimate: float
    low: float
    high: float


def fewest(error: float) -> int:
    """The number of differences from which on an interval of this error has bounds at all."""
    return math.ceil(math.log2(1 / error))


def paired_interval(differences: Sequence[float], error: float) -> Interval:
    """The interval for the median of `differences`; unbounded where there are too few of them for `error`.

    Raises:
        ValueError: there are no differences, one is not finite, or `error` is not between 0 and 1/2.
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise ValueError(f"an interval needs finite differences, one at least; these are {list(differences)[:8]}")
    if not 0 < error < 0.5:
        raise ValueError(f"the error of an interval lies between 0 and 0.5 and cannot be {error}")
    rows, columns = np.triu_indices(values.size)
    means = (values[rows] + values[columns]) / 2
    skipped = _skipped(values.size, error)
    if skipped is None:
        return Interval(float(np.median(means)), -math.inf, math.inf)
    means.partition((skipped, means.size - 1 - skipped))
    return Interval(float(np.median(means)), float(means[skipped]), float(means[-1 - skipped]))


@functools.lru_cache(maxsize=256)
def _skipped(count: int, error: float) -> int | None:
    """How many of the sorted means lie outside of the interval on each side; None where no bound has so small an error.

    The k-th smallest mean is above the true median with the probability that the sum of the positive ranks is below k.
    """
    if count > EXACT_UP_TO:
        mean = count * (count + 1) / 4
        spread = math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
        below = math.floor(mean + _normal_quantile(error) * spread - 0.5)
        return max(0, below)
    ways = np.ones(1)
    for rank in range(1, count + 1):
        more = np.zeros(ways.size + rank)
        more[: ways.size] += ways
        more[rank:] += ways
        ways = more / 2
    outside = int(np.searchsorted(np.cumsum(ways), error, side="right"))
    return outside - 1 if outside else None


def _normal_quantile(probability: float) -> float:
    """By bisection of the error function: this needs no statistics library, and runs once per number of rounds."""
    low, high = -40.0, 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if math.erfc(-middle / math.sqrt(2)) / 2 < probability:
            low = middle
        else:
            high = middle
    return low
