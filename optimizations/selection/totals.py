"""Whether a candidate takes longer than another in all calls together, though not in most of them.

Medians say nothing of what is seldom: a candidate that allocates in every tenth call, or has to follow inputs that move
in every fourth, may be the fastest in nearly all calls and the slowest in sum, which is what the program waits for. So
where sums speak against a candidate, be it by a single call, medians decide nothing for it. Sums are far less certain:
a call that the machine held up is in them. A call counts for a few times its candidate's median at most (`OUTLIER`).

Note [Sure sums]. Differences of sums in rounds have no distribution that could be supposed: nearly all are small, and a
few are large. But of candidates that are alike, each difference is as likely to be turned around, for the order in a
round is drawn. So what is looked at is their sum over the root of the sum of their squares, which exceeds x with a
probability of exp(-x*x/2) at most, whatever the differences are (Hoeffding 1963; Efron, "Student's t-test under
symmetry conditions", 1969). Ten large ones, all against one candidate, are 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from optimizations.selection.period import NO_PERIOD, Period

OUTLIER = 8.0
"""Times the median of its candidate that a call counts for at most: what stopped the program for longer, a debugger or
another program, was not that candidate."""

LIKELY, DOUBTED = 1.0, 2.0
"""Standard errors beyond which no guess keeps what takes longer in sum, and beyond which there always is a doubt."""

SINGLE = 0.15
"""Standard errors beyond which nothing is decided yet for what takes longer in sum, after one round; 0.6 after 15. A
single slow call is one, less what the candidate gains in its other calls. After four times as many rounds it takes
twice as many, up to `DOUBTED`, or slow calls that all candidates have would leave a doubt for ever."""

PLAIN = 1.6
"""Standard errors of sums as they are beyond which there is a doubt, too. Where several calls of a block are slow, its
median is slow with them, and the block says nothing of what is seldom. Slow regimes are in these sums, so less than
this says nothing either."""

FEWEST = 8
"""Rounds: the standard error of fewer is not known well enough."""

Means = Mapping[str, float]
"""The mean time of a block in seconds, by candidate, as `clipped_mean` has it."""


def clipped_mean(calls: Sequence[tuple[int, float]], median_s: float, period: Period = NO_PERIOD) -> float:
    """Of a block's counted calls, by their numbers and times; what is dear because of the period is taken out."""
    return fmean(
        min(seconds, OUTLIER * median_s * max(1.0, period.ratio(call))) - period.offset_s(call)
        for call, seconds in calls
    )


def errors_against(one: str, other: str, rounds: Sequence[Means], margin: float) -> float:
    """By how many standard errors, as Note [Sure sums] has them, `one` takes longer than `other` in sum.

    0 where it takes longer by no more than `margin`, which is a share of the other's time. 0 too where fewer than
    `FEWEST` rounds have both.
    """
    both = [(found[one], found[other]) for found in rounds if one in found and other in found]
    return _errors(both, margin)


def seeming_errors_against(
    one: str, other: str, rounds: Sequence[Means], medians: Sequence[Means], ratio: float, margin: float
) -> float:
    """`errors_against`, for a doubt: blocks that slow regimes made longer as a whole count as what they are, so that
    what is seldom is seen among them. `ratio` is what `one` takes in most calls, times the other; `medians` are the
    blocks'. How uncertain that ratio is is not in it."""
    both = [
        (ratio * found[one] / middle[one], found[other] / middle[other])
        for found, middle in zip(rounds, medians, strict=True)
        if one in found and other in found
    ]
    return _errors(both, margin)


def _errors(both: Sequence[tuple[float, float]], margin: float) -> float:
    if len(both) < FEWEST:
        return 0.0
    more = [first - second for first, second in both]
    if fmean(more) <= margin * fmean(second for _, second in both):
        return 0.0
    return math.fsum(more) / math.sqrt(math.fsum(one * one for one in more))


def doubtful(rounds: int) -> float:
    """Standard errors beyond which there is a doubt after so many rounds."""
    return min(DOUBTED, SINGLE * math.sqrt(rounds))


def sure(error: float) -> float:
    """Standard errors that candidates which are alike exceed with this probability at most. Note [Sure sums]."""
    return math.sqrt(2 * math.log(1 / error))
