"""How many times faster one mode is than another, how well that is known, and what may be called a difference.

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

Note [Bootstrap]: processes of one program differ (where its memory lies, what else the host does), and blocks of one
process cannot show by how much. So each replicate draws as many processes as there are, with replacement, and the
blocks of each drawn process again. Three processes drawn with replacement vary too little; deviations are widened by
sqrt(R / (R - 1)) (T. Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69(4),
2015). Noise of blocks enters twice that way, and the interval errs on the wide side where blocks vary most.

Note [Spread]: three processes hardly tell how much processes differ: where they happen to agree, the interval is too
narrow, and with processes that differ by 3 % a mode would be found to differ from itself in one case of six. On the
recorded H200s it is 0.3 to 6 %, by workload. So all modes of a workload with CUDA graphs tell it together
(`process_spread`), and processes of a ratio are taken to differ by no less than that. It is then about one of twenty.

Note [Verdicts]: a difference below `MARGIN` is ignored, whichever its sign. SAME is the outcome of two
one-sided tests at 5 % against the margin (TOST), that is: the 90 % interval lies within it. FAST and SLOW need an
interval of 95 % that excludes 1 and reaches beyond the margin. So everything is decided once the interval is narrow
enough, and sampling goes on until it is (`narrow_enough`) or there is no time left. That rule looks at the width and
not at the verdict: stopping when a verdict comes out would find differences that are not there. Where processes of
one program differ by so much that three of them decide little, there are more of them (`enough_processes`). That looks
at all ratios of a workload at once, for the width of a single one is hardly known from three processes: one that is
narrow by chance would end it too early.
`tests/test_stats_recorded_noise.py` has the rates of wrong and missed verdicts on blocks drawn from recorded ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

Samples = Sequence[Sequence[Sequence[float]]]

TRIMMED = (0.1, 0.5)
"""Quantiles of the blocks between which they count."""
MARGIN = 0.03
"""Differences up to 3 % are called none: a mode is SAME from 1 / 1.03 to 1.03."""
CONFIDENCE = 0.95
EQUIVALENCE_CONFIDENCE = 0.90
REPLICATES = 1000
MINIMUM_PROCESSES = 3
MINIMUM_BLOCKS = 5
"""Per process. With fewer of either there is no verdict but AMBG."""


class Verdict(StrEnum):
    """What may be said of a mode against its baseline (see Note [Verdicts])."""

    FAST = "FAST"
    SLOW = "SLOW"
    SAME = "SAME"
    AMBG = "AMBG"


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster than the reference a mode is, with its 95 % interval [low, high].

    `same_low` and `same_high` bound the 90 % interval. `processes` is the number of pairs of processes, `blocks` the
    least number of blocks that one of them has, `log_replicates` the widened bootstrap replicates of log(ratio).
    """

    value: float
    low: float
    high: float
    same_low: float
    same_high: float
    processes: int
    blocks: int
    log_replicates: NDArray[np.float64] = field(repr=False, compare=False)


class Replicated(Protocol):
    """A ratio with the bootstrap replicates of its logarithm: of modes of one run, or of cells of two runs."""

    @property
    def value(self) -> float: ...

    @property
    def log_replicates(self) -> NDArray[np.float64]: ...


@dataclass(frozen=True, slots=True)
class GeometricMean:
    """Geometric mean of `count` workloads' ratios, with its 95 % interval [low, high]."""

    value: float
    low: float
    high: float
    count: int


def location(log_medians: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of the order statistics between `TRIMMED`, along the last axis: see Note [Location]."""
    count = log_medians.shape[-1]
    first = int(TRIMMED[0] * count)
    last = max(first + 1, math.ceil(TRIMMED[1] * count))
    return np.asarray(np.sort(log_medians, axis=-1)[..., first:last].mean(axis=-1))


def speed_up(reference: Samples, mode: Samples, seed: Sequence[int] = (0,), spread: float = 0.0) -> Ratio:
    """Speed-up of `mode` over `reference`, whose process r was measured together with the mode's process r.

    `spread` is by how much log ratios of processes differ at least: see Note [Spread].

    The same samples and seed always give the same interval; use another seed for each pair of cells, or errors of
    unrelated workloads would be drawn alike.

    Raises:
        ValueError: the sides differ in the number of processes, there is none, one has no block, or a block is empty
            or holds a time that is not positive.
    """
    if len(reference) != len(mode) or not mode:
        raise ValueError(f"both modes need equally many processes; got {len(reference)} and {len(mode)}")
    generator = np.random.default_rng(seed)
    pairs = [(log_medians(theirs), log_medians(ours)) for theirs, ours in zip(reference, mode, strict=True)]
    log_ratios = _log_ratios(pairs)
    log_ratio = float(np.mean(log_ratios))
    drawn = np.array([[resampled(side, generator) for side in pair] for pair in pairs])
    apart = _spread_out(log_ratios, spread) - log_ratios
    replicates = resample_processes(drawn[:, 0] - drawn[:, 1] + apart[:, None], log_ratio, generator)
    return ratio_of(log_ratio, replicates, len(pairs), min(side.size for pair in pairs for side in pair))


def process_spread(pairs: Sequence[tuple[Samples, Samples]], modes: int) -> float:
    """By how much log ratios of processes differ, from these pairs of so many modes, each `(reference, mode)` as for
    `speed_up`: the root mean square of their standard deviations, as much larger as Student's t of so many modes and
    processes is than a normal deviate. 0 where there are no two processes.

    Raises:
        ValueError: as `speed_up`.
    """
    found = [
        _log_ratios([(log_medians(theirs), log_medians(ours)) for theirs, ours in both])
        for pair in pairs
        if len(both := list(zip(*pair, strict=True))) > 1
    ]
    if not found or modes < 2:
        return 0.0
    freedom = (min(map(len, found)) - 1) * (modes - 1)
    tail = (1 + CONFIDENCE) / 2
    widened = float(stdtrit(freedom, tail) / ndtri(tail))
    return widened * math.sqrt(math.fsum(float(np.var(one, ddof=1)) for one in found) / len(found))


def _log_ratios(pairs: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> NDArray[np.float64]:
    """One for each process, from the `log_medians` of its blocks: of the reference, and of the mode."""
    return np.array([location(theirs) - location(ours) for theirs, ours in pairs])


def _spread_out(log_ratios: NDArray[np.float64], spread: float) -> NDArray[np.float64]:
    """The same around their mean, with at least this standard deviation. Equal ones get equal distances."""
    count = len(log_ratios)
    if count < 2 or float(np.std(log_ratios, ddof=1)) >= spread:
        return log_ratios
    mean = np.mean(log_ratios)
    deviations = log_ratios - mean
    if float(np.std(deviations)) < 1e-6 * spread:
        deviations = np.arange(count) - (count - 1) / 2
    return np.asarray(mean + deviations * (spread / np.std(deviations, ddof=1)))


def resampled(
    log_medians: NDArray[np.float64], generator: np.random.Generator, replicates: int = REPLICATES
) -> NDArray[np.float64]:
    """Locations of blocks drawn again, with replacement. Shape [..., blocks] to [..., replicates].

    Leading axes are other data drawn in the same way: the places of the blocks are the same for all of them.
    """
    count = log_medians.shape[-1]
    return location(log_medians[..., generator.integers(count, size=(replicates, count))])


def resample_processes(
    by_process: NDArray[np.float64], log_ratio: NDArray[np.float64] | float, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Replicates of the mean over processes, drawn again too and widened: see Note [Bootstrap].

    Args:
        by_process: shape [..., processes, replicates], replicates of each process's log ratio.
        log_ratio: shape [...], the estimate they scatter around.
        generator: where the draws come from.

    Returns:
        Shape [..., replicates].
    """
    processes, replicates = by_process.shape[-2:]
    drawn = generator.integers(processes, size=(processes, replicates))
    columns = np.argsort(generator.random((processes, replicates)), axis=1)
    means = by_process[..., drawn, columns].mean(axis=-2)
    widened = math.sqrt(processes / (processes - 1)) if processes > 1 else 1.0
    centre = np.asarray(log_ratio)[..., None]
    return np.asarray(centre + (means - centre) * widened)


def judge(ratio: Ratio) -> Verdict:
    """The verdict by Note [Verdicts]; AMBG if there are too few processes or blocks."""
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
    """Whether `processes` pairs like this one (`samples[block][sample]`) would give an interval that decides.

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
    """Whether another process of each mode would be of little use: the 90 % intervals of these ratios have half-widths
    of at most two thirds of the margin, in the root mean square. With `more`: whether so many others like these will
    have been enough. A half-width goes with 1 / sqrt(processes - 1), see Note [Bootstrap]."""
    squares = [
        math.log(ratio.same_high / ratio.same_low) ** 2 / 4 / (1 + more / max(1, ratio.processes - 1))
        for ratio in ratios
        if ratio.same_low > 0
    ]
    return not squares or math.sqrt(math.fsum(squares) / len(squares)) <= math.log1p(MARGIN) * 2 / 3


def geometric_mean(ratios: Sequence[Replicated]) -> GeometricMean:
    """Geometric mean over workloads. The workloads are taken as given; the interval is that of their measurement.

    Raises:
        ValueError: there is no ratio.
    """
    if not ratios:
        raise ValueError("a geometric mean needs at least one ratio")
    value = math.exp(math.fsum(math.log(ratio.value) for ratio in ratios) / len(ratios))
    replicates = np.mean([ratio.log_replicates for ratio in ratios], axis=0)
    low, high = np.exp(_interval(replicates, CONFIDENCE))
    return GeometricMean(value, min(float(low), value), max(float(high), value), len(ratios))


def log_medians(blocks: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """The logarithm of the median of each block.

    Raises:
        ValueError: there is no block, or one holds no samples, or other numbers than finite ones above 0.
    """
    if not blocks:
        raise ValueError("there is no block of samples")
    for index, block in enumerate(blocks):
        if not block or not all(math.isfinite(sample) and sample > 0 for sample in block):
            raise ValueError(f"block {index} must hold finite times above 0; got {list(block)!r:.80}")
    return np.array([math.log(float(np.median(block))) for block in blocks])


def _interval(log_replicates: NDArray[np.float64], confidence: float) -> NDArray[np.float64]:
    tail = (1 - confidence) / 2
    return np.quantile(log_replicates, [tail, 1 - tail], axis=-1)


def ratio_of(log_ratio: float, replicates: NDArray[np.float64], processes: int, blocks: int) -> Ratio:
    """The ratio with its intervals. A single block tells nothing of them: they reach from 0 to infinity."""
    value = math.exp(log_ratio)
    if blocks < 2:
        return Ratio(value, 0.0, math.inf, 0.0, math.inf, processes, blocks, replicates)
    (low, high), (same_low, same_high) = (
        np.exp(_interval(replicates, confidence)) for confidence in (CONFIDENCE, EQUIVALENCE_CONFIDENCE)
    )
    return Ratio(
        value,
        min(float(low), value),
        max(float(high), value),
        min(float(same_low), value),
        max(float(same_high), value),
        processes,
        blocks,
        replicates,
    )
