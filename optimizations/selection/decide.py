"""Which candidate is kept, from rounds of timings: a pure function.

In a round each candidate that is still considered serves a block of consecutive calls, and has one number: the median
of the block's times, its first calls left out. Differences of two candidates' logarithms within rounds are what is
judged (`interval`): what changes from round to round, a warmer GPU or a busier host, is in both.

* A candidate that is slower than another beyond the noise is dropped; the simplest of all only if it is slower by more
  than `Rules.least_gain_s`.
* The simplest candidate left that is not slower by more than `Rules.margin` than any other left is kept; the simplest
  of all also where it is not slower by more than `least_gain_s`. So if nothing is faster beyond the noise, the simplest
  stays: *same*.
* Neither is decided for a candidate that seems to take longer than the other in sum; it goes on until it is sure that
  it does, and then it is dropped (`totals`).
* Where measuring ends before that is sure, estimates decide, by half the margin: *unresolved*. Of candidates that
  are as good as each other by these, the last one stays, which serves calls without selection: in doubt nothing
  changes. The intervals say how much that may cost.

Looks are taken at numbers of rounds that are fixed beforehand, and share the error among them.

Note [A few microseconds]. Around each call that is timed, selection does work of its own. The host then finds less of
what the call runs in its caches, and the device has been idle. A function that runs without its graph runs more of the
host's code than a graph's launch, and so it loses more. On an H200's host EOS took 2 to 6 us longer without its graph
than with it where it was measured, and 2 us less to none where nobody disturbed it. So a few microseconds are no
reason for a graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from optimizations.selection.interval import Interval, fewest, paired_interval
from optimizations.selection.totals import LIKELY, PLAIN, Means, doubtful, errors_against, seeming_errors_against, sure

Outcome = Literal["faster", "same", "unresolved"]
EndedBy = Literal["certainty", "calls", "time", "cost"]
"""What ended measuring: a sure verdict, or what it may take at most."""

HOPELESS = (2.5, 1.5, 1.15)
"""After one round, after two, and from the third one on. See `hopeless`. Slow regimes of hosts were 2.1 times as slow,
and one may begin between the blocks of a round."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How much is measured, and what counts.

    Attributes:
        block_calls: consecutive calls of one candidate.
        lead_in_calls: the first calls of a block, which are not counted: they pay for what the candidate before left in
            caches and queues.
        lead_in_rounds: rounds at the beginning that are not counted: a candidate's first calls load kernels and
            allocate.
        margin: a share of time; less than that is not worth a candidate that is not the simplest.
        least_gain_s: seconds of an iteration; nor is less than that worth giving up the simplest of all. Note [A few
            microseconds].
        error: how probable a wrong verdict is at most, over all looks and pairs, where candidates are equal.
        most_calls: calls after which a verdict is reached in any case.
        most_s: seconds of calls after which a verdict is reached with the round that is under way, if three count by
            then; after twice as many in any case. A program whose calls take seconds is not measured for minutes.
        look_growth: from one look to the next, rounds grow by this factor.
        fewest_calls: calls that count before the first look, of all candidates, in blocks: what is slow in a twentieth
            of a candidate's calls has mostly been seen once by then.
    """

    block_calls: int = 4
    lead_in_calls: int = 1
    lead_in_rounds: int = 1
    margin: float = 0.0175
    least_gain_s: float = 5e-6
    error: float = 0.02
    most_calls: int = 4000
    most_s: float = 60.0
    look_growth: float = 1.25
    fewest_calls: int = 120

    def __post_init__(self) -> None:
        if not 0 <= self.lead_in_calls < self.block_calls:
            raise ValueError(f"of a block of {self.block_calls} calls, {self.lead_in_calls} cannot be left out")
        if self.most_calls < 1 or self.lead_in_rounds < 0 or self.look_growth <= 1:
            raise ValueError(f"rules that never end or never look: {self}")
        if not self.most_s > 0:
            raise ValueError(f"measuring that takes no time finds nothing: {self}")
        if not 0 < self.error < 1 or not 0 < self.margin < 1:
            raise ValueError(f"margin and error are shares between 0 and 1: {self}")
        if not 0 <= self.least_gain_s < math.inf:
            raise ValueError(f"the least gain is a number of seconds: {self}")

    def error_per_look(self, candidates: int) -> float:
        """What is left of `error` for one bound of one pair at one look."""
        pairs = max(1, candidates * (candidates - 1) // 2)
        return self.error / (pairs * len(self.looks(candidates)))

    def looks(self, candidates: int) -> tuple[int, ...]:
        """Numbers of counted rounds at which it is decided, ascending; intervals have bounds from the first one on."""
        pairs = max(1, candidates * (candidates - 1) // 2)
        last = self.most_rounds(2)  # where all but two are dropped at once there are as many
        for first in range(min(last, math.ceil(self.fewest_calls / (candidates * self.block_calls))), last):
            looks = [first]
            while (following := math.ceil(looks[-1] * self.look_growth)) < last:
                looks.append(following)
            looks.append(last)
            if fewest(self.error / (pairs * len(looks))) <= first:
                return tuple(looks)
        return (last,)

    def most_rounds(self, candidates: int) -> int:
        """Counted rounds that `most_calls` allow while no candidate is dropped; 1 at least."""
        return max(1, self.most_calls // (candidates * self.block_calls) - self.lead_in_rounds)


Round = Mapping[str, float]
"""The median time of a block in seconds, by candidate; dropped candidates are not in it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many times the time of `candidate` `other` takes, by `rounds` rounds in which both were measured."""

    candidate: str
    other: str
    ratio: Interval
    rounds: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What is kept, and why.

    Attributes:
        kept: the candidate.
        outcome: "faster" if a simpler one than `kept` was dropped, "same" if the simplest is kept because no other is
            faster by more than the margin, "unresolved" if measuring ended before either was sure.
        comparisons: of each candidate with `kept`.
        dropped: candidates that were slower than another beyond the noise, or `hopeless` when a budget ran out.
    """

    kept: str
    outcome: Outcome
    comparisons: tuple[Comparison, ...]
    dropped: frozenset[str]


@dataclass(frozen=True, slots=True)
class Judged:
    """Candidates that are still considered, simplest first, and the decision once there is one."""

    left: tuple[str, ...]
    decision: Decision | None


def block_median(seconds: Sequence[float], rules: Rules) -> float:
    """The time of a block: the median of its calls, the first ones left out.

    Raises:
        ValueError: the block is not whole, or a time is not a positive number.
    """
    if len(seconds) != rules.block_calls:
        raise ValueError(f"a block has {rules.block_calls} calls, not {len(seconds)}")
    counted = sorted(seconds[rules.lead_in_calls :])
    if not all(0 < value < math.inf for value in counted):
        raise ValueError(f"times are positive numbers of seconds; these are {list(seconds)}")
    middle = len(counted) // 2
    return counted[middle] if len(counted) % 2 else (counted[middle - 1] + counted[middle]) / 2


def hopeless(candidates: Sequence[str], rounds: Sequence[Round]) -> frozenset[str]:
    """Candidates that took at least `HOPELESS` times the time of one and the same other in every round; none before the
    first.

    For a budget that is running out: what is so slow has used most of it up, and what is left tells the others apart.
    At 5 % noise, three rounds say so of an equal candidate once in thousands of measurements, and fewer never.
    """
    least = HOPELESS[min(len(rounds), len(HOPELESS)) - 1]

    def beaten(one: str, other: str) -> bool:
        both = [found[one] / found[other] for found in rounds if one in found and other in found]
        return bool(both) and min(both) >= least

    return frozenset(one for one in candidates if any(beaten(one, other) for other in candidates if other != one))


def judge(
    candidates: Sequence[str],
    rounds: Sequence[Round],
    rules: Rules,
    *,
    at_the_end: bool = False,
    given_up: Collection[str] = (),
    means: Sequence[Means] = (),
    looked_at: int = 0,
) -> Judged:
    """Who is left after these counted rounds, in the order in which they were measured, with the `means` of the same.

    `candidates` stand simplest first; those of them that were `given_up` are out. Only numbers of rounds in
    `Rules.looks` are looked at, so that the answer for the same rounds does not depend on how often it was asked for;
    and only those beyond `looked_at`, where those before were, and whoever was dropped then is `given_up`.
    `at_the_end`: no more rounds will come.

    Raises:
        ValueError: there is no candidate, or one stands twice.
    """
    left = tuple(one for one in candidates if one not in given_up)
    if not left or len(set(candidates)) != len(candidates):
        raise ValueError(f"candidates are different names, one at least; these are {list(candidates)}")
    if len(left) == 1:
        error = rules.error_per_look(len(candidates))
        return Judged(left, _decision(candidates, left, left[0], rounds, error, resolved=True))
    looks = [look for look in rules.looks(len(candidates)) if looked_at < look <= len(rounds)]
    if at_the_end and len(rounds) not in looks:
        looks.append(len(rounds))
    error = rules.error_per_look(len(candidates))
    for look in looks:
        pairs = _Pairs(rounds[:look], means[:look], error, rules, _least_gains(candidates, rounds[:look], rules))
        left = _without_slower(left, pairs)
        if all(pairs.is_close(left[0], other) for other in left[1:]):
            return Judged(left, _decision(candidates, left, left[0], rounds[:look], error, resolved=True))
    if not at_the_end:
        return Judged(left, None)
    pairs = _Pairs(rounds, means, error, rules, _least_gains(candidates, rounds, rules))
    likely = (one for one in reversed(left) if all(pairs.seems_close(one, other) for other in left if one != other))
    return Judged(left, _decision(candidates, left, next(likely, left[-1]), rounds, error, resolved=False))


def compare(candidate: str, other: str, rounds: Sequence[Round], error: float) -> Comparison | None:
    """`other` over `candidate` by the rounds that have both; None where there is none."""
    both = [math.log(one[other] / one[candidate]) for one in rounds if candidate in one and other in one]
    if not both:
        return None
    log = paired_interval(both, error)
    ratio = Interval(math.exp(log.estimate), math.exp(log.low), math.exp(log.high))
    return Comparison(candidate, other, ratio, len(both))


def _inverse(bound: float) -> float:
    return 1 / bound if bound > 0 else math.inf


def _least_gains(candidates: Sequence[str], rounds: Sequence[Round], rules: Rules) -> Mapping[tuple[str, str], float]:
    """What the second of two has to gain over the first, as a share of its own time. Note [A few microseconds]."""
    found = {}
    for other in candidates[1:]:
        times = [one[other] for one in rounds if other in one]
        found[candidates[0], other] = rules.least_gain_s / median(times) if times else 0.0
    return found


@dataclass(frozen=True, slots=True)
class _Pairs:
    """What rounds say of two candidates. `gains`: what the second has to gain over the first, as a share of its own
    time."""

    rounds: Sequence[Round]
    means: Sequence[Means]
    error: float
    rules: Rules
    gains: Mapping[tuple[str, str], float]
    known: dict[tuple[str, str], Comparison | None] = field(default_factory=dict)

    def compare(self, one: str, other: str) -> Comparison | None:
        """`compare`, once for both ways round: an interval takes milliseconds of the program's time."""
        if (other, one) in self.known:
            found = self.known[other, one]
            if found is None:
                return None
            ratio = found.ratio
            back = Interval(1 / ratio.estimate, _inverse(ratio.high), _inverse(ratio.low))
            return Comparison(one, other, back, found.rounds)
        if (one, other) not in self.known:
            self.known[one, other] = compare(one, other, self.rounds, self.error)
        return self.known[one, other]

    def is_slower(self, one: str, other: str) -> bool:
        """Whether `one` is slower than `other` beyond the noise, and by the least gain."""
        if errors_against(one, other, self.means, self._margin(one, other)) > sure(self.error):
            return True
        found = self.compare(one, other)
        slower = found is not None and found.ratio.high * (1 + self.gains.get((one, other), 0.0)) < 1
        return slower and self._sums_against(other, one, found) <= doubtful(len(self.rounds))

    def is_close(self, one: str, other: str) -> bool:
        """Whether `one` is slower than `other` by no more than the margin, with the certainty that is asked for."""
        found = self.compare(other, one)
        close = found is not None and found.ratio.high <= 1 + self._margin(one, other)
        return close and self._sums_against(one, other, found) <= doubtful(len(self.rounds))

    def seems_close(self, one: str, other: str) -> bool:
        """`is_close`, by the estimates."""
        found = self.compare(other, one)
        close = found is None or found.ratio.estimate <= 1 + self.rules.margin / 2
        return close and self._sums_against(one, other, found) <= LIKELY

    def _margin(self, one: str, other: str) -> float:
        return max(self.rules.margin, self.gains.get((one, other), 0.0))

    def _sums_against(self, one: str, other: str, found: Comparison | None) -> float:
        """`found` compares the two, as `one` over `other`, in most calls."""
        if found is None or not self.means:
            return 0.0
        margin = self._margin(one, other)
        seeming = seeming_errors_against(one, other, self.means, self.rounds, found.ratio.estimate, margin)
        plain = errors_against(one, other, self.means, margin)
        return max(seeming, plain) if plain > PLAIN else seeming


def _without_slower(left: tuple[str, ...], pairs: _Pairs) -> tuple[str, ...]:
    """Those that are not slower than another."""
    slower = {one for one, other in itertools.permutations(left, 2) if pairs.is_slower(one, other)}
    # A circle (a before b before c before a) can come of noise. Then nothing was told apart.
    return tuple(one for one in left if one not in slower) or left


def _decision(
    candidates: Sequence[str],
    left: Sequence[str],
    kept: str,
    rounds: Sequence[Round],
    error: float,
    *,
    resolved: bool,
) -> Decision:
    compared = (compare(kept, other, rounds, error) for other in candidates if other != kept)
    outcome: Outcome = "unresolved" if not resolved else "same" if kept == candidates[0] else "faster"
    dropped = frozenset(candidates) - frozenset(left)
    return Decision(kept, outcome, tuple(one for one in compared if one is not None), dropped)
