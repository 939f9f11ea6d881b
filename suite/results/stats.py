"""Estimate speed-ups of one mode over another with confidence intervals, and decide which differences are significant.

All functions take samples as `samples[process][block][sample]`, in any unit of time. A process is one start of a mode;
process r of one mode was alive together with process r of the other, and their blocks were interleaved, in an order
that changes.

Note [Location]: disturbances (another tenant of the host, a slower clock, an interrupt) make a measurement longer,
never shorter, and affect whole blocks: on the recorded H200 every tenth to third block of a host-bound mode took 1.1 to
2.1 times as long. So the time of a process is the mean over its blocks' log medians between the 10th and the 50th
percentile: the undisturbed half, without its lowest tenth. It changes only when more than half of the blocks are
disturbed. On the recorded blocks its standard error is half that of the median, and a third of that of the mean.
Disturbances of adjacent blocks of different modes are hardly correlated (0.0 to 0.3 on recorded blocks), so pairing
them gains nothing; disturbances longer than a block affect all modes equally.

Note [Processes]: processes of one program differ (memory layout, other load of the host), and blocks of one process
cannot show by how much. So an interval is Student's t interval around the mean of the processes' log ratios, which
includes the scatter of blocks. Three to five processes estimate their variance poorly, and the interval would be too
narrow where they agree by chance. So the ratios of a workload share information: their variances are modelled as drawn
from a scaled inverse chi-square distribution, whose scale and degrees of freedom are estimated from the moments of
their logarithms. The variance of a ratio is the mean of its own and of the scale, weighted with their degrees of
freedom (G. K. Smyth, "Linear Models and Empirical Bayes Methods", Statistical Applications in Genetics and Molecular
Biology 3(1), 2004, sections 3 and 6). Where the variances of a workload's ratios are similar, each is estimated from
all of them; where a mode that launches kernels one by one varies ten times as much as the others, each is estimated by
itself. Unlike in that paper, a variance is never made smaller than the ratio's own: all ratios over such a mode share
its variation, and one in seven would be reported as different where it is not.

For a single process, the error of its location is estimated by a bootstrap over its blocks. Such a ratio has no
verdict.

Note [Means]: ratios of workloads are independent. The error of their geometric mean is the root of the sum of their
squared errors over their number, with the degrees of freedom of F. E. Satterthwaite, "An Approximate Distribution of
Estimates of Variance Components", Biometrics Bulletin 2(6), 1946.

Note [Verdicts]: a difference below `MARGIN` is ignored, whichever its sign. SAME is the outcome of two
one-sided tests at 5 % against the margin (TOST), that is: the 90 % interval is within it. FAST and SLOW need an
interval of 95 % that excludes 1 and reaches beyond the margin. So a narrow enough interval always decides, and sampling
continues until it is narrow enough (`narrow_enough`) or the time is over. The rule depends on the width and not on the
verdict: stopping at a verdict would report differences that do not exist.
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
"""Quantiles of a process's blocks between which the mean is taken."""
MARGIN = 0.03
"""Differences up to 3 % are ignored: a mode is SAME from 1 / 1.03 to 1.03."""
CONFIDENCE = 0.95
EQUIVALENCE_CONFIDENCE = 0.90
REPLICATES = 200
MINIMUM_PROCESSES = 3
MINIMUM_BLOCKS = 3
"""Blocks per process. With fewer processes or blocks the verdict is AMBG."""
LEAST_VARIANCE = 1e-8
"""Smallest variance of log ratios in a logarithm: clocks have no higher resolution."""


class Verdict(StrEnum):
    """Classify a mode against its baseline (see Note [Verdicts])."""

    FAST = "FAST"
    SLOW = "SLOW"
    SAME = "SAME"
    AMBG = "AMBG"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Hold a speed-up over a reference: a ratio, a change of a ratio, or a mean of `count` ratios.

    `error` is the standard error of log(value), and `freedom` the degrees of freedom of its estimate.
    `processes` is the number of pairs of processes, `blocks` the least number of blocks that one of them has.
    """

    value: float
    error: float
    freedom: float
    processes: int = 0
    blocks: int = 0
    count: int = 1

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Return the ends of Student's interval; 0 and infinity where the error is unknown."""
        reach = self.half_width(confidence)
        return self.value * math.exp(-reach), self.value * (math.exp(reach) if reach < 700 else math.inf)

    def half_width(self, confidence: float = CONFIDENCE) -> float:
        """Return half of the interval, as a logarithm."""
        return self.error * float(stdtrit(self.freedom, (1 + confidence) / 2))

    def text(self, digits: int = 2) -> str:
        """Write the value with its interval, and without one where the error is unknown."""
        low, high = self.interval()
        value = f"{self.value:.{digits}f}"
        return f"{value} [{low:.{digits}f}, {high:.{digits}f}]" if math.isfinite(high) else value

    @property
    def low(self) -> float:
        return self.interval()[0]

    @property
    def high(self) -> float:
        return self.interval()[1]


@dataclass(frozen=True, slots=True)
class Spread:
    """Hold the estimated distribution of the variances of a workload's log ratios: see Note [Processes].

    `variance` is its scale, `freedom` its degrees of freedom.
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

    `spread` is the distribution of variances over all ratios of the workload (`spread_of`).

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

    For one side `log_ratio` is their mean; for the two sides of a comparison, the difference of their means. None where
    the variance between processes cannot be estimated.
    """
    own, degrees = variance_within(sides)
    freedom = degrees + spread.freedom
    if not freedom:
        return None
    variance = max(own, (degrees * own + spread.freedom * spread.variance) / freedom)
    error = math.sqrt(variance * math.fsum(1 / len(side) for side in sides))
    return Ratio(math.exp(log_ratio), error, freedom, min(map(len, sides)), blocks)


def spread_of(by_process: Sequence[Sequence[LogRatios]], modes: int) -> Spread:
    """Estimate the distribution of variances between processes from the log ratios of all pairs of a workload's modes.

    Each pair has one side for each run. Pairs of a single process are left out. See Note [Processes].
    """
    several = [found for sides in by_process if (found := variance_within(sides))[1]]
    if len(several) < 2 or modes < 2:
        return UNKNOWN
    variances, freedom = np.array(several).T
    # Pairs that share a mode are correlated, so that the number of modes limits the degrees of freedom.
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
    """Return the log speed-up of each process.

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
    """Return whether the interval of `processes` pairs like this one (`samples[block][sample]`) would be narrow enough.

    Its half-width is then at most half of the margin, so that a mode without a difference is SAME, and a mode that
    differs by more than the margin is FAST or SLOW.

    Raises:
        ValueError: a side has no block, or a block is empty or holds a time that is not positive.
    """
    return 1.96 * _error_of_blocks(reference, mode) / math.sqrt(processes) <= math.log1p(MARGIN) / 2


def _error_of_blocks(reference: Sequence[Sequence[float]], mode: Sequence[Sequence[float]]) -> float:
    """Return the standard error of a process's log ratio, from a bootstrap over its blocks."""
    generator = np.random.default_rng(0)
    drawn = (generator.choice(log_medians(side), (REPLICATES, len(side))) for side in (reference, mode))
    theirs, ours = map(location, drawn)
    return float(np.std(theirs - ours))


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
        if not block or not (min(block) > 0 and math.isfinite(sum(block))):  # a NaN fails one of both conditions
            raise ValueError(f"block {index} must hold finite times above 0; got {list(block)!r:.80}")
    return np.array([math.log(median(block)) for block in blocks])  # NumPy's median takes ten times as long for so few
