"""Ratios of two programs that were measured one after another, with an interval.

Samples come as blocks: `blocks[k]` holds the samples of block k, in any unit of time (the ratio has none).

Note [Block bootstrap]: samples within a block are correlated, so blocks are drawn: each replicate draws as many blocks
as there are, with replacement, for each side by itself, and then draws the samples within each drawn block again.
Noise within blocks enters twice this way, so the interval errs on the wide side. With five to ten blocks a plain
percentile interval is too narrow; the usual correction is applied (T. Hesterberg, "What Teachers Should Know About the
Bootstrap", The American Statistician 69(4), 2015): deviations are widened by sqrt(n / (n - 1)), and the tails are those
of Student's t with n - 1 degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

from suite.stats import CONFIDENCE, log_medians

Blocks = Sequence[Sequence[float]]

REPLICATES = 4000


@dataclass(frozen=True, slots=True)
class RatioAcrossRuns:
    """How many times faster than the reference a program is, with its 95 % interval [low, high].

    `blocks` is the number of blocks of the shorter side, `log_replicates` the widened bootstrap replicates of
    log(ratio), from which means over workloads take their interval.
    """

    value: float
    low: float
    high: float
    blocks: int
    log_replicates: NDArray[np.float64] = field(repr=False, compare=False)


def unpaired_ratio(reference: Blocks, blocks: Blocks, seed: Sequence[int] = (0,)) -> RatioAcrossRuns:
    """Return the speed-up over a `reference` that was measured at another time; see Note [Block bootstrap].

    Drift between the two measurements does not cancel, and the interval cannot know it. The same samples and seed
    always give the same interval.

    Raises:
        ValueError: a side has no block, or a block is empty or holds a time that is not positive.
    """
    ours, theirs = log_medians(blocks), log_medians(reference)
    generator = np.random.default_rng(seed)
    sides = [
        _replicates(side, generator.integers(len(side), size=(REPLICATES, len(side))), generator)
        for side in (reference, blocks)
    ]
    shorter = min(len(reference), len(blocks))
    return _estimate(float(np.mean(theirs) - np.mean(ours)), sides[0] - sides[1], shorter)


def _replicates(blocks: Blocks, drawn: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Return the mean log median of each row of `drawn` (block indices), with samples drawn again in every block."""
    log_medians = np.empty(drawn.shape)
    for index, block in enumerate(blocks):
        places = drawn == index
        samples = np.asarray(block, dtype=np.float64)
        resampled = generator.choice(samples, size=(int(places.sum()), len(samples)))
        log_medians[places] = np.log(np.median(resampled, axis=1))
    return log_medians.mean(axis=1)


def _estimate(log_ratio: float, replicates: NDArray[np.float64], blocks: int) -> RatioAcrossRuns:
    """Make the interval by Note [Block bootstrap]. That of one block reaches from 0 to infinity."""
    value = math.exp(log_ratio)
    if blocks < 2:
        return RatioAcrossRuns(value, 0.0, math.inf, blocks, replicates)
    widened = log_ratio + (replicates - log_ratio) * math.sqrt(blocks / (blocks - 1))
    tail = ndtr(stdtrit(blocks - 1, (1 - CONFIDENCE) / 2))
    low, high = np.exp(np.quantile(widened, [tail, 1 - tail]))
    return RatioAcrossRuns(value, min(float(low), value), max(float(high), value), blocks, widened)
