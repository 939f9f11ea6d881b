"""Whether a candidate takes longer than another in all calls together, though not in most of them.

Medians say nothing of what is seldom: a candidate that allocates in every tenth call, or has to follow inputs that move
in every fourth, may be the fastest in nearly all calls and the slowest in sum, which is what the program waits for. So
where sums speak against a candidate, medians alone decide nothing for it. Sums are far less certain: a single call that
the machine held up is in them. A call counts for a few times its candidate's median at most (`OUTLIER`), and what sums
say is taken as sure beyond many standard errors only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

OUTLIER = 8.0
"""Times the median of its candidate that a call counts for at most: what stopped the program for longer, a debugger or
another program, was not that candidate."""

DOUBT, LIKELY, SURE = 1.5, 2.0, 5.0
"""Standard errors beyond which nothing is decided yet for what takes longer in sum, no guess keeps it, and it is
dropped."""

FEWEST = 8
"""Rounds: the standard error of fewer is not known well enough."""

Means = Mapping[str, float]
"""The mean time of a block in seconds, by candidate, as `clipped_mean` has it."""


def clipped_mean(seconds: Sequence[float], median_s: float) -> float:
    """Of a block's counted times."""
    return fmean(min(one, OUTLIER * median_s) for one in seconds)


def errors_against(one: str, other: str, rounds: Sequence[Means], margin: float) -> float:
    """By how many standard errors `one` takes longer than `other` in sum.

    0 where it takes longer by no more than `margin`, which is a share of the other's time. 0 too where fewer than
    `FEWEST` rounds have both.
    """
    both = [(found[one], found[other]) for found in rounds if one in found and other in found]
    if len(both) < FEWEST:
        return 0.0
    more = [first - second for first, second in both]
    if fmean(more) <= margin * fmean(second for _, second in both):
        return 0.0
    spread = stdev(more) / math.sqrt(len(more))
    return fmean(more) / spread if spread > 0 else math.inf
