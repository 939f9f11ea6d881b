"""Ratios of cells of two runs, which were never alive together, with an interval and a floor.

Within a run, `suite.stats` decides; across runs, what drifted in between is in every ratio, and a floor must hold it.

All functions take samples as blocks: `blocks[k]` holds the samples that block k of a mode measured, in any unit of
time (the ratio has none). Two modes that alternated (A B A B) met the same state of the machine in block k, which is
why block k of one is compared with block k of the other and with no other.

Note [Paired ratio]: the estimate is the geometric mean over k of median(reference block k) / median(block k). Whatever
slows both modes in a block by the same factor (clocks, temperature, a neighbour) cancels in it. Values above 1
mean the mode is faster than the reference.

Note [Block bootstrap]: samples within a block are correlated, so the blocks are what is drawn: each replicate draws
as many block pairs as there are, with replacement, and then draws the samples within each drawn block again, for both
modes. (Noise within blocks enters twice this way, in the block medians and in the second draw: the interval errs on the
wide side.) With five to ten blocks a plain percentile interval is too narrow; the usual correction is applied (T.
Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69(4), 2015): deviations are
widened by sqrt(n / (n - 1)), and the tails are those of Student's t with n - 1 degrees of freedom.

Note [Noise floor]: an interval says how well a ratio is known, not whether such a ratio means anything. The floor is
what the same measurement yields when a mode is compared with itself: its own neighbouring blocks, odd against even,
taken for two modes. A difference below the floor is not called one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

from suite.stats import CONFIDENCE, Verdict, log_medians

Blocks = Sequence[Sequence[float]]

REPLICATES = 4000
MINIMUM_BLOCKS = 5
"""Fewer blocks give no verdict but AMBG: the whole range of four values misses their median in one case of eight."""
MINIMUM_FLOOR = 0.01
"""No difference below 1 % is called one, however quiet the machine was: processes of one mode differ from each other
(memory layout, choice of kernels), and blocks of one process cannot show by how much."""
MAXIMUM_SAME = 0.05
"""Modes are not called the same if they may differ by more than 5 %: on a noisy machine that is for AMBG to say."""
MAXIMUM_SWAPS = 4096
"""Swaps of neighbouring blocks looked at for the floor; up to 12 pairs that is all of them."""


@dataclass(frozen=True, slots=True)
class RatioAcrossRuns:
    """How many times faster than the reference a mode is, with its 95 % interval [low, high].

    `blocks` is the number of block pairs (of the shorter side, where the modes did not alternate), `log_replicates`
    the widened bootstrap replicates of log(ratio), from which means over workloads take their interval.
    """

    value: float
    low: float
    high: float
    blocks: int
    log_replicates: NDArray[np.float64] = field(repr=False, compare=False)


def paired_ratio(reference: Blocks, blocks: Blocks, seed: Sequence[int] = (0,)) -> RatioAcrossRuns:
    """Speed-up over `reference` of a mode whose blocks alternated with it: `reference[k]` belongs to `blocks[k]`.

    See Note [Paired ratio] and Note [Block bootstrap]. The same samples and seed always give the same interval; use
    another seed for each pair of cells, or errors of unrelated workloads would be drawn alike.

    Raises:
        ValueError: the sides differ in the number of blocks, or a block is empty or holds a time that is not positive.
    """
    if len(reference) != len(blocks):
        raise ValueError(f"alternating modes have equally many blocks; got {len(reference)} and {len(blocks)}")
    ours, theirs = log_medians(blocks), log_medians(reference)
    generator = np.random.default_rng(seed)
    drawn = generator.integers(len(blocks), size=(REPLICATES, len(blocks)))
    replicates = _replicates(reference, drawn, generator) - _replicates(blocks, drawn, generator)
    return _estimate(float(np.mean(theirs - ours)), replicates, len(blocks))


def unpaired_ratio(reference: Blocks, blocks: Blocks, seed: Sequence[int] = (0,)) -> RatioAcrossRuns:
    """Speed-up over a `reference` that was measured at another time: each side's blocks are drawn by themselves.

    Drift between the two measurements does not cancel and the interval cannot know it; judge it by `drift_floor`.

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


def noise_floor(blocks: Blocks) -> float | None:
    """|ratio - 1| that a mode compared with itself reaches: the 95th percentile over all swaps of neighbours.

    Blocks (0, 1), (2, 3), ... are taken as pairs of two modes that alternated, and again (1, 2), (3, 4), ..., so that
    no block is left out; the larger floor counts, and never less than `MINIMUM_FLOOR`. None with fewer than two blocks:
    there is nothing to compare. See Note [Noise floor].

    Raises:
        ValueError: a block is empty or holds a time that is not positive.
    """
    medians = log_medians(blocks)
    if len(medians) < 2:
        return None
    return max([MINIMUM_FLOOR, *(_swap_spread(medians[start:]) for start in (0, 1) if len(medians) - start >= 2)])


def drift_floor(blocks: Blocks) -> float | None:
    """The floor for modes measured one after another: the whole range of the mode's own block medians.

    What a mode drifted while it was measured, it may have drifted in between. None with fewer than two blocks.

    Raises:
        ValueError: a block is empty or holds a time that is not positive.
    """
    medians = log_medians(blocks)
    if len(medians) < 2:
        return None
    return max(MINIMUM_FLOOR, math.expm1(float(np.ptp(medians))))


def judge(ratio: RatioAcrossRuns, floor: float | None) -> Verdict:
    """The verdict on a ratio against a noise floor (0.01 = 1 %; either way round, so that 1 % slower is 1/1.01).

    FAST: the whole interval lies above 1 + floor. SLOW: the whole interval lies below 1 / (1 + floor). SAME: the whole
    interval lies between the two, and no farther from 1 than `MAXIMUM_SAME` however large the floor. AMBG: anything
    else, and always where the floor is not known or the ratio rests on fewer than `MINIMUM_BLOCKS` blocks.
    """
    if floor is None or ratio.blocks < MINIMUM_BLOCKS:
        return Verdict.AMBG
    if ratio.low > 1 + floor:
        return Verdict.FAST
    if ratio.high < 1 / (1 + floor):
        return Verdict.SLOW
    same = 1 + min(floor, MAXIMUM_SAME)
    return Verdict.SAME if ratio.low >= 1 / same and ratio.high <= same else Verdict.AMBG


def _replicates(blocks: Blocks, drawn: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Mean log median of each row of `drawn` (block indices), with the samples of every drawn block drawn again."""
    log_medians = np.empty(drawn.shape)
    for index, block in enumerate(blocks):
        places = drawn == index
        samples = np.asarray(block, dtype=np.float64)
        resampled = generator.choice(samples, size=(int(places.sum()), len(samples)))
        log_medians[places] = np.log(np.median(resampled, axis=1))
    return log_medians.mean(axis=1)


def _estimate(log_ratio: float, replicates: NDArray[np.float64], blocks: int) -> RatioAcrossRuns:
    """The interval by Note [Block bootstrap]. One block gives none: it reaches from 0 to infinity."""
    value = math.exp(log_ratio)
    if blocks < 2:
        return RatioAcrossRuns(value, 0.0, math.inf, blocks, replicates)
    widened = log_ratio + (replicates - log_ratio) * math.sqrt(blocks / (blocks - 1))
    tail = ndtr(stdtrit(blocks - 1, (1 - CONFIDENCE) / 2))
    low, high = np.exp(np.quantile(widened, [tail, 1 - tail]))
    return RatioAcrossRuns(value, min(float(low), value), max(float(high), value), blocks, widened)


def _swap_spread(medians: NDArray[np.float64]) -> float:
    """95th percentile of |ratio - 1| over swaps within the pairs (0, 1), (2, 3), ... of one mode's log medians."""
    pairs = len(medians) // 2
    differences = medians[1 : 2 * pairs : 2] - medians[0 : 2 * pairs : 2]
    means = np.abs(_swaps(pairs) @ differences) / pairs
    return math.expm1(float(np.quantile(means, CONFIDENCE)))


def _swaps(pairs: int) -> NDArray[np.int64]:
    """Rows of signs +1/-1 per pair: every combination where there are at most `MAXIMUM_SWAPS`, else a fixed choice."""
    if 2**pairs <= MAXIMUM_SWAPS:
        return np.array(list(product((1, -1), repeat=pairs)), dtype=np.int64)
    return np.random.default_rng(pairs).choice([1, -1], size=(MAXIMUM_SWAPS, pairs))
