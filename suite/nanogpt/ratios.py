"""How many times faster one path is than another, and how well that is known.

Note [Rounds]: in a round both paths run the same configuration one shortly after the other, so that what changes over
the run meets both. So a round gives one ratio: of whole generations, or of the medians of its steps. What counts is the
median over rounds. A process is slow for whole generations on end, now one path's and now the other's: a mean would
weigh how often that was. The interval is that of the percentile bootstrap: each replicate draws as many rounds as there
are, with replacement. Steps of one round are not drawn for themselves, for they are all slow or all fast.

Each path has one process, so that the interval is that of these processes: others may differ by more.

The median is taken of logarithms. So a ratio is one over that of the same paths the other way round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from suite.nanogpt.paths import EAGER, GRAPH, PATHS
from suite.nanogpt.records import Generation
from suite.results.stats import CONFIDENCE, REPLICATES, interval, log_medians

MINIMUM_ROUNDS = 5
"""With fewer rounds no interval is given. The true median lies between the least and the greatest of four ratios in
only 87.5 % of cases."""

PAIRED = (
    "Ratios are paired by round: of both paths' median step, or of their whole generations. Shown are the median over "
    f"rounds and, from {MINIMUM_ROUNDS} rounds on, its 95 % interval from rounds drawn again with replacement. It is "
    "that of these processes, one for each path: others may differ by more."
)
"""What tables say of their ratios."""


@dataclass(frozen=True, slots=True)
class RoundRatio:
    """Median over rounds, with its 95 % interval [low, high] where there are enough of them: see Note [Rounds]."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def median_ms(rounds_us: Sequence[Sequence[float]]) -> float | None:
    """Median over the steps of all rounds, in ms, of times in us; None without any."""
    steps = [step for steps in rounds_us for step in steps]
    return statistics.median(steps) / 1e3 if steps else None


def step_over_eager(paths: Mapping[str, Generation], name: str) -> RoundRatio | None:
    """Of the steps' medians; None for eager itself, and where either has no samples."""
    base, own = paths.get(EAGER), paths.get(name)
    if base is None or own is None or name == EAGER:
        return None
    return ratio_over_rounds(base.call_us, own.call_us)


def whole_over_eager(paths: Mapping[str, Generation], name: str) -> RoundRatio | None:
    """Of whole generations; None for eager itself, and where either has no samples."""
    return _whole(paths, name, EAGER) if name != EAGER else None


def whole_over_graph(paths: Mapping[str, Generation], name: str) -> RoundRatio | None:
    """Of whole generations, over stock CUDA graphs, for the other compiled paths; None where either has no samples."""
    return _whole(paths, name, GRAPH) if name in PATHS and PATHS[name].is_compared_with_graph else None


def ratio_over_rounds(base: Sequence[Sequence[float]], own: Sequence[Sequence[float]]) -> RoundRatio | None:
    """How many times faster `own` is than `base`, each `times[round][sample]`; None where no round has both.

    A path that failed has fewer rounds than the others; its last ones are those that it lacks. The same times always
    give the same interval.
    """
    rounds = [(there, here) for there, here in zip(base, own, strict=False) if there and here]
    if not rounds:
        return None
    theirs, ours = zip(*rounds, strict=True)
    log_ratios = log_medians(theirs) - log_medians(ours)
    value, count = math.exp(float(np.median(log_ratios))), len(log_ratios)
    if count < MINIMUM_ROUNDS:
        return RoundRatio(value)
    drawn = np.random.default_rng(0).integers(count, size=(REPLICATES, count))
    low, high = np.exp(interval(np.median(log_ratios[drawn], axis=-1), CONFIDENCE))
    return RoundRatio(value, min(float(low), value), max(float(high), value))


def _whole(paths: Mapping[str, Generation], name: str, base_name: str) -> RoundRatio | None:
    base, own = paths.get(base_name), paths.get(name)
    if base is None or own is None:
        return None
    return ratio_over_rounds([[total] for total in base.total_s], [[total] for total in own.total_s])
