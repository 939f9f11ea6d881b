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

Of a single process there are only its blocks: drawn again with replacement they tell the error of its location. Such a
ratio has no verdict.

Note [Means]: ratios of workloads are independent. The error of their geometric mean is the root of the sum of their
squared errors over their number, with the degrees of freedom of F. E. Satterthwaite, "An Approximate Distribution of
Estimates of Variance Components", Biometrics Bulletin 2(6), 1946.

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
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import digamma, polygamma, stdtrit

Samples = Sequence[Sequence[Sequence[float]]]
LogRatios = NDArray[np.float64]
"""A log ratio for each process."""

TRIMMED = (0.1, 0.5)
"""Quantiles of the blocks between which they count."""
MARGIN = 0.03
"""Differences up to 3 % are called none: a mode is SAME from 1 / 1.03 to 1.03."""
CONFIDENCE = 0.95
EQUIVALENCE_CONFIDENCE = 0.90
REPLICATES = 200
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
    """Hold how many times faster something is than its reference: a ratio, a change of one, or a mean of `count` ones.

    `error` is the standard error of log(value), and `freedom` the degrees of freedom that it was estimated with.
    `processes` is the number of pairs of processes, `blocks` the least number of blocks that one of them has.
    """

    value: float
    error: float
    freedom: float
    processes: int = 0
    blocks: int = 0
    count: int = 1

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Return the ends of Student's interval; it reaches from 0 to infinity where nothing is known."""
        reach = self.half_width(confidence)
        return self.value * math.exp(-reach), self.value * (math.exp(reach) if reach < 700 else math.inf)

    def half_width(self, confidence: float = CONFIDENCE) -> float:
        """Return half of the interval, as a logarithm."""
        return self.error * float(stdtrit(self.freedom, (1 + confidence) / 2))

    @property
    def low(self) -> float:
        return self.interval()[0]

    @property
    def high(self) -> float:
        return self.interval()[1]


@dataclass(frozen=True, slots=True)
class Spread:
    """Hold what is known of the variances of a workload's log ratios from process to process: see Note [Processes].

    `variance` is the scale of their distribution, `freedom` the degrees of freedom that it counts as.
    """

    variance: float
    freedom: float


UNKNOWN = Spread(0.0, 0.0)


def location(log_medians: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of the order statistics between `TRIMMED`, along the last axis: see Note [Location]."""
    count = log_medians.shape[-1]
    first = int(TRIMMED[0] * count)
    last = max(first + 1, math.ceil(TRIMMED[1] * count))
    return np.asarray(np.sort(log_medians, axis=-1)[..., first:last].mean(axis=-1))


def speed_up(reference: Samples, mode: Samples, spread: Spread = UNKNOWN) -> Ratio:
    """Return the speed-up of `mode` over `reference`, whose process r was measured together with the mode's process r.

    `spread` is what all ratios of the workload tell of how much processes differ (`spread_of`).

    Raises:
        ValueError: the sides differ in the number of processes, there is none, one has no block, or a block is empty
            or holds a time that is not positive.
    """
    if len(reference) != len(mode) or not mode:
        raise ValueError(f"both modes need equally many processes; got {len(reference)} and {len(mode)}")
    by_process = log_ratios(reference, mode)
    blocks = min(len(process) for side in (reference, mode) for process in side)
    if len(by_process) > 1:
        made = ratio_of_processes(float(by_process.mean()), [by_process], spread, blocks)
        assert made is not None, "two processes have a variance"
        return made
    error = _error_of_blocks(reference[0], mode[0]) if blocks > 1 else math.inf
    return Ratio(math.exp(by_process[0]), error, max(1, blocks - 1), 1, blocks)


def variance_within(sides: Sequence[LogRatios]) -> tuple[float, int]:
    """Return the variance of one process's log ratio around its side's mean, with its degrees of freedom."""
    freedom = sum(len(side) - 1 for side in sides)
    squares = sum(float(np.sum((side - side.mean()) ** 2)) for side in sides)
    return (squares / freedom if freedom else 0.0), freedom


def ratio_of_processes(log_ratio: float, sides: Sequence[LogRatios], spread: Spread, blocks: int = 0) -> Ratio | None:
    """Return the ratio with its error, from the log ratios of processes: see Note [Processes].

    Of one side, `log_ratio` is their mean; of the two sides of a comparison, the difference of their means. None where
    nothing tells how much processes differ.
    """
    own, degrees = variance_within(sides)
    freedom = degrees + spread.freedom
    if not freedom:
        return None
    variance = max(own, (degrees * own + spread.freedom * spread.variance) / freedom)
    error = math.sqrt(variance * math.fsum(1 / len(side) for side in sides))
    return Ratio(math.exp(log_ratio), error, freedom, min(map(len, sides)), blocks)


def spread_of(by_process: Sequence[Sequence[LogRatios]], modes: int) -> Spread:
    """Return how much processes differ, as the log ratios of pairs of so many modes of a workload tell together.

    Each pair has one side for each run. Pairs of a single process tell nothing. See Note [Processes].
    """
    several = [found for sides in by_process if (found := variance_within(sides))[1]]
    if len(several) < 2 or modes < 2:
        return UNKNOWN
    variances, freedom = np.array(several).T
    # As much as so many modes can tell: pairs that share a mode tell the same in part.
    most = float((modes - 1) * freedom.min())
    half = freedom / 2
    logs = np.log(np.maximum(variances, LEAST_VARIANCE)) - digamma(half) + np.log(half)
    beyond_chance = float(np.var(logs, ddof=1) - np.mean(polygamma(1, half)))
    if beyond_chance <= 0:
        return Spread(float(np.mean(variances)), most)
    prior = brentq(lambda x: float(polygamma(1, x)) - beyond_chance, 1e-6, 1 + 2 / beyond_chance)
    scale = math.exp(float(np.mean(logs)) + float(digamma(prior)) - math.log(prior))
    return Spread(scale, min(2 * prior, most))


def log_ratios(reference: Samples, mode: Samples) -> LogRatios:
    """Return for each process how much faster it is, as a logarithm.

    Raises:
        ValueError: as `speed_up`.
    """
    pairs = zip(reference, mode, strict=True)
    return np.array([location(log_medians(theirs)) - location(log_medians(ours)) for theirs, ours in pairs])


def judge(ratio: Ratio) -> Verdict:
    """Return the verdict by Note [Verdicts]; AMBG if there are too few processes or blocks."""
    if ratio.processes < MINIMUM_PROCESSES or ratio.blocks < MINIMUM_BLOCKS:
        return Verdict.AMBG
    (low, high), (same_low, same_high) = ratio.interval(), ratio.interval(EQUIVALENCE_CONFIDENCE)
    if same_low >= 1 / (1 + MARGIN) and same_high <= 1 + MARGIN:
        return Verdict.SAME
    if low > 1 and high > 1 + MARGIN:
        return Verdict.FAST
    if high < 1 and low < 1 / (1 + MARGIN):
        return Verdict.SLOW
    return Verdict.AMBG


def narrow_enough(reference: Sequence[Sequence[float]], mode: Sequence[Sequence[float]], processes: int) -> bool:
    """Return whether `processes` pairs like this one (`samples[block][sample]`) would give an interval that decides.

    Its half-width is then at most half of the margin, so that a mode without a difference is SAME, and one that
    differs by more than the margin is FAST or SLOW.

    Raises:
        ValueError: a side has no block, or a block is empty or holds a time that is not positive.
    """
    return 1.96 * _error_of_blocks(reference, mode) / math.sqrt(processes) <= math.log1p(MARGIN) / 2


def _error_of_blocks(reference: Sequence[Sequence[float]], mode: Sequence[Sequence[float]]) -> float:
    """Return the standard error of a process's log ratio, from its blocks drawn again with replacement."""
    generator = np.random.default_rng(0)
    drawn = (generator.choice(log_medians(side), (REPLICATES, len(side))) for side in (reference, mode))
    theirs, ours = map(location, drawn)
    return float(np.std(theirs - ours))


def enough_processes(ratios: Sequence[Ratio], more: int = 0) -> bool:
    """Return whether another process of each mode would be of little use: the 90 % intervals of these ratios have
    half-widths of at most four fifths of the margin, in the root mean square. With `more`: whether so many others like
    these will have been enough, for a half-width goes with 1 / sqrt(processes)."""
    squares = [
        ratio.half_width(EQUIVALENCE_CONFIDENCE) ** 2 / (1 + more / ratio.processes)
        for ratio in ratios
        if math.isfinite(ratio.error)
    ]
    return not squares or math.sqrt(math.fsum(squares) / len(squares)) <= math.log1p(MARGIN) * 4 / 5


def geometric_mean(ratios: Sequence[Ratio]) -> Ratio:
    """Return the geometric mean over workloads, which are taken as given: see Note [Means].

    Raises:
        ValueError: there is no ratio.
    """
    if not ratios:
        raise ValueError("a geometric mean needs at least one ratio")
    value = math.exp(math.fsum(math.log(each.value) for each in ratios) / len(ratios))
    squares = [each.error**2 for each in ratios]
    total = math.fsum(squares)
    freedom = (
        total**2 / math.fsum(square**2 / each.freedom for square, each in zip(squares, ratios, strict=True))
        if 0 < total < math.inf
        else math.fsum(each.freedom for each in ratios)
    )
    return Ratio(value, math.sqrt(total) / len(ratios), freedom, count=len(ratios))


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
