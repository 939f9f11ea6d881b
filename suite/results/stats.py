"""Estimate how many times faster one mode is than another, how well that is known, and what counts as a difference.

All functions take samples as `samples[process][block][sample]`, in any unit of time. A process is one start of a mode;
process r of one mode was alive together with process r of the other, and their blocks came in turn, in an order that
changes.

Note [Location]: what disturbs a measurement (another tenant of the host, a slower clock, an interrupt) makes it longer,
never shorter, and swallows whole blocks: on the recorded H200 every tenth to third block of a host-bound mode took 1.1
to 2.1 times as long. So the time of a process is the mean over its blocks' log medians between the 10th and the 50th
percentile: the undisturbed half, without its lowest tenth. Half of the blocks may be disturbed before it moves. On the
recorded blocks its standard error is half that of the median, and a third of that of the mean. Neighbouring blocks of
different modes hardly share what disturbs them (the correlation of recorded neighbours is 0.0 to 0.3), so that nothing
is gained by pairing them; what lasts longer than a block meets all modes alike.

Note [Processes]: processes of one program differ (where its memory lies, what else the host does), and blocks of one
process cannot show by how much. So the log ratios of its processes are the sample that an interval goes by: that of
Student's t around their mean. What blocks scatter is in them already. Three to five processes hardly tell their
variance, and where they happen to agree the interval would be too narrow. All ratios of a workload together tell more:
their variances are taken to be drawn from a scaled inverse chi-square distribution, whose scale and degrees of freedom
come from the moments of their logarithms, and that of a ratio is the mean of its own and of the scale, weighted with
their degrees of freedom (G. K. Smyth, "Linear Models and Empirical Bayes Methods", Statistical Applications in Genetics
and Molecular Biology 3(1), 2004, sections 3 and 6). Where a workload's ratios vary alike, each is known as well as all
of them; where a mode that launches kernels one by one varies ten times as much as the others, each stands for itself.
Unlike there, a variance is never made smaller than its ratio's own: all ratios over such a mode share what it does, and
would be found to differ in one case of seven where they do not.

Of a single process there are only its blocks: each replicate draws as many as there are, with replacement. Such a ratio
has no verdict.

Note [Verdicts]: a difference below `MARGIN` is ignored, whichever its sign. SAME is the outcome of two
one-sided tests at 5 % against the margin (TOST), that is: the 90 % interval lies within it. FAST and SLOW need an
interval of 95 % that excludes 1 and reaches beyond the margin. So everything is decided once the interval is narrow
enough, and sampling goes on until it is (`narrow_enough`) or there is no time left. That rule looks at the width and
not at the verdict: stopping when a verdict comes out would find differences that are not there. Where processes of
one program differ by so much that three of them decide little, there are more of them (`enough_processes`).
`tests/suite/results/test_stats_recorded_noise.py` has the rates of wrong and missed verdicts on blocks drawn from
recorded ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma, polygamma, stdtrit

Samples = Sequence[Sequence[Sequence[float]]]

TRIMMED = (0.1, 0.5)
"""Quantiles of the blocks between which they count."""
MARGIN = 0.03
"""Differences up to 3 % are called none: a mode is SAME from 1 / 1.03 to 1.03."""
CONFIDENCE = 0.95
EQUIVALENCE_CONFIDENCE = 0.90
REPLICATES = 1000
MINIMUM_PROCESSES = 3
MINIMUM_BLOCKS = 3
"""Per process. With fewer of either there is no verdict but AMBG."""
LEAST_VARIANCE = 1e-8
"""Least variance of log ratios whose logarithm is taken: clocks do not tell more."""


class Verdict(StrEnum):
    """Say what may be concluded on a mode against its baseline (see Note [Verdicts])."""

    FAST = "FAST"
    SLOW = "SLOW"
    SAME = "SAME"
    AMBG = "AMBG"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Hold how many times faster than the reference a mode is, with its 95 % interval [low, high].

    `same_low` and `same_high` bound the 90 % interval. `processes` is the number of pairs of processes, `blocks` the
    least number of blocks that one of them has, `log_replicates` draws from what is known of log(ratio).
    """

    value: float
    low: float
    high: float
    same_low: float
    same_high: float
    processes: int
    blocks: int
    log_replicates: NDArray[np.float64] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Spread:
    """Hold what is known of the variances of a workload's log ratios from process to process: see Note [Processes].

    `variance` is the scale of their distribution, `freedom` the degrees of freedom that it counts as.
    """

    variance: float
    freedom: float


UNKNOWN = Spread(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class GeometricMean:
    """Hold the geometric mean of `count` workloads' ratios, with its 95 % interval [low, high]."""

    value: float
    low: float
    high: float
    count: int


def location(log_medians: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of the order statistics between `TRIMMED`, along the last axis: see Note [Location]."""
    count = log_medians.shape[-1]
    first = int(TRIMMED[0] * count)
    last = max(first + 1, math.ceil(TRIMMED[1] * count))
    return np.asarray(np.sort(log_medians, axis=-1)[..., first:last].mean(axis=-1))


def speed_up(reference: Samples, mode: Samples, seed: Sequence[int] = (0,), spread: Spread = UNKNOWN) -> Ratio:
    """Return the speed-up of `mode` over `reference`, whose process r was measured together with the mode's process r.

    `spread` is what all ratios of the workload tell of how much processes differ (`spread_of`).

    The same samples and seed always give the same interval; use another seed for each pair of cells, or errors of
    unrelated workloads would be drawn alike.

    Raises:
        ValueError: the sides differ in the number of processes, there is none, one has no block, or a block is empty
            or holds a time that is not positive.
    """
    if len(reference) != len(mode) or not mode:
        raise ValueError(f"both modes need equally many processes; got {len(reference)} and {len(mode)}")
    generator = np.random.default_rng(seed)
    by_process = log_ratios(reference, mode)
    blocks = min(len(process) for side in (reference, mode) for process in side)
    if len(by_process) > 1:
        return ratio_of_processes(by_process, blocks, spread, generator)
    theirs, ours = (resampled(log_medians(side[0]), generator) for side in (reference, mode))
    return _ratio_of_blocks(float(by_process[0]), theirs - ours, blocks)


def spread_of(by_process: Sequence[NDArray[np.float64]], modes: int) -> Spread:
    """Return how much processes differ, as the `log_ratios` of pairs of so many modes of a workload tell. Pairs of a
    single process tell nothing."""
    return spread_of_variances(
        [(float(np.var(own, ddof=1)), len(own) - 1) for own in by_process if len(own) > 1], modes
    )


def spread_of_variances(several: Sequence[tuple[float, int]], modes: int) -> Spread:
    """Return what variances of log ratios, each with its degrees of freedom, tell together: see Note [Processes]."""
    if len(several) < 2 or modes < 2:
        return UNKNOWN
    variances = np.array([variance for variance, _ in several])
    freedom = np.array([degrees for _, degrees in several])
    # As much as so many modes can tell: pairs that share a mode tell the same in part.
    most = float((modes - 1) * freedom.min())
    half = freedom / 2
    logs = np.log(np.maximum(variances, LEAST_VARIANCE)) - digamma(half) + np.log(half)
    beyond_chance = float(np.var(logs, ddof=1) - np.mean(polygamma(1, half)))
    if beyond_chance <= 0:
        return Spread(float(np.mean(variances)), most)
    prior = _inverse_trigamma(beyond_chance)
    scale = math.exp(float(np.mean(logs)) + float(digamma(prior)) - math.log(prior))
    return Spread(scale, min(2 * prior, most))


def _inverse_trigamma(value: float) -> float:
    """Return the x > 0 whose trigamma is `value`, by Newton's method on 1 / trigamma, which is convex."""
    x = 0.5 + 1 / value
    for _ in range(50):
        found = float(polygamma(1, x))
        step = found * (1 - found / value) / float(polygamma(2, x))
        x += step
        if abs(step) < 1e-8 * x:
            break
    return x


def log_ratios(reference: Samples, mode: Samples) -> NDArray[np.float64]:
    """Return for each process how much faster it is, as a logarithm.

    Raises:
        ValueError: as `speed_up`.
    """
    pairs = zip(reference, mode, strict=True)
    return np.array([location(log_medians(theirs)) - location(log_medians(ours)) for theirs, ours in pairs])


def ratio_of_processes(
    by_process: NDArray[np.float64], blocks: int, spread: Spread, generator: np.random.Generator
) -> Ratio:
    """Return the ratio with its intervals, from the `log_ratios` of at least two processes: see Note [Processes]."""
    count = len(by_process)
    log_ratio, own = float(np.mean(by_process)), float(np.var(by_process, ddof=1))
    freedom = count - 1 + spread.freedom
    variance = max(own, ((count - 1) * own + spread.freedom * spread.variance) / freedom)
    error = math.sqrt(variance / count)
    outer, inner = (
        error * float(stdtrit(freedom, (1 + confidence) / 2)) for confidence in (CONFIDENCE, EQUIVALENCE_CONFIDENCE)
    )
    return Ratio(
        math.exp(log_ratio),
        math.exp(log_ratio - outer),
        _exp(log_ratio + outer),
        math.exp(log_ratio - inner),
        _exp(log_ratio + inner),
        count,
        blocks,
        log_ratio + error * generator.standard_t(freedom, REPLICATES),
    )


def _exp(log: float) -> float:
    """Return the exponential, also of what is too large: an interval may be so wide that nothing is known."""
    return math.exp(log) if log < 700 else math.inf


def resampled(
    log_medians: NDArray[np.float64], generator: np.random.Generator, replicates: int = REPLICATES
) -> NDArray[np.float64]:
    """Return locations of blocks drawn again, with replacement. Shape [..., blocks] to [..., replicates].

    Leading axes are other data drawn in the same way: the places of the blocks are the same for all of them.
    """
    count = log_medians.shape[-1]
    return location(log_medians[..., generator.integers(count, size=(replicates, count))])


def judge(ratio: Ratio) -> Verdict:
    """Return the verdict by Note [Verdicts]; AMBG if there are too few processes or blocks."""
    if ratio.processes < MINIMUM_PROCESSES or ratio.blocks < MINIMUM_BLOCKS:
        return Verdict.AMBG
    if ratio.same_low >= 1 / (1 + MARGIN) and ratio.same_high <= 1 + MARGIN:
        return Verdict.SAME
    if ratio.low > 1 and ratio.high > 1 + MARGIN:
        return Verdict.FAST
    if ratio.high < 1 and ratio.low < 1 / (1 + MARGIN):
        return Verdict.SLOW
    return Verdict.AMBG


def narrow_enough(reference: Sequence[Sequence[float]], mode: Sequence[Sequence[float]], processes: int) -> bool:
    """Return whether `processes` pairs like this one (`samples[block][sample]`) would give an interval that decides.

    Its half-width is then at most half of the margin, so that a mode without a difference is SAME, and one that
    differs by more than the margin is FAST or SLOW.

    Raises:
        ValueError: a side has no block, or a block is empty or holds a time that is not positive.
    """
    generator = np.random.default_rng(0)
    theirs, ours = (resampled(log_medians(side), generator, replicates=200) for side in (reference, mode))
    half_width = 1.96 * float(np.std(theirs - ours)) / math.sqrt(processes)
    return half_width <= math.log1p(MARGIN) / 2


def enough_processes(ratios: Sequence[Ratio], more: int = 0) -> bool:
    """Return whether another process of each mode would be of little use: the 90 % intervals of these ratios have
    half-widths of at most four fifths of the margin, in the root mean square. With `more`: whether so many others like
    these will have been enough, for a half-width goes with 1 / sqrt(processes)."""
    squares = [
        math.log(ratio.same_high / ratio.same_low) ** 2 / 4 / (1 + more / ratio.processes)
        for ratio in ratios
        if ratio.same_low > 0
    ]
    return not squares or math.sqrt(math.fsum(squares) / len(squares)) <= math.log1p(MARGIN) * 4 / 5


def geometric_mean(ratios: Sequence[Ratio]) -> GeometricMean:
    """Return the geometric mean over workloads. The workloads are taken as given; the interval is of their measurement.

    Of replicates, which are drawn independently, as many count as the ratio with the fewest has.

    Raises:
        ValueError: there is no ratio.
    """
    if not ratios:
        raise ValueError("a geometric mean needs at least one ratio")
    value = math.exp(math.fsum(math.log(ratio.value) for ratio in ratios) / len(ratios))
    count = min(len(ratio.log_replicates) for ratio in ratios)
    replicates = np.mean([ratio.log_replicates[:count] for ratio in ratios], axis=0)
    low, high = np.exp(interval(replicates, CONFIDENCE))
    return GeometricMean(value, min(float(low), value), max(float(high), value), len(ratios))


def log_medians(blocks: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Return the logarithm of the median of each block.

    Raises:
        ValueError: there is no block, or one holds no samples, or other numbers than finite ones above 0.
    """
    if not blocks:
        raise ValueError("there is no block of samples")
    for index, block in enumerate(blocks):
        if not block or not (min(block) > 0 and math.isfinite(sum(block))):  # NaN is not above 0, or in the sum
            raise ValueError(f"block {index} must hold finite times above 0; got {list(block)!r:.80}")
    return np.array([math.log(median(block)) for block in blocks])  # of so few, NumPy's takes ten times as long


def interval(log_replicates: NDArray[np.float64], confidence: float) -> NDArray[np.float64]:
    """Return both ends of the percentile interval: the quantiles with half of the rest outside, along the last axis."""
    tail = (1 - confidence) / 2
    return np.quantile(log_replicates, [tail, 1 - tail], axis=-1)


def _ratio_of_blocks(log_ratio: float, replicates: NDArray[np.float64], blocks: int) -> Ratio:
    """Return the ratio of one process with its intervals; of a single block they reach from 0 to infinity."""
    value = math.exp(log_ratio)
    if blocks < 2:
        return Ratio(value, 0.0, math.inf, 0.0, math.inf, 1, blocks, replicates)
    (low, high), (same_low, same_high) = (
        np.exp(interval(replicates, confidence)) for confidence in (CONFIDENCE, EQUIVALENCE_CONFIDENCE)
    )
    return Ratio(
        value,
        min(float(low), value),
        max(float(high), value),
        min(float(same_low), value),
        max(float(same_high), value),
        1,
        blocks,
        replicates,
    )
