"""Ratios, intervals and verdicts of a run, on samples with known ratios."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import stdtrit

from suite.measure.modes import MODES, REFERENCE_MODE
from suite.results import stats
from suite.results.stats import Ratio, Verdict


def spread_of_pairs(pairs, modes):
    return stats.spread_of([[stats.log_ratios(*pair)] for pair in pairs], modes)


def simulate(
    generator: np.random.Generator, median_us: float, noise: float, blocks: int = 30, spread: float = 0.0
) -> list[list[list[float]]]:
    """Three processes of a mode with noise between blocks, and with `spread` between processes."""
    return [
        [[median_us * factor * math.exp(generator.normal(0, noise))] * 3 for _ in range(blocks)]
        for factor in np.exp(generator.normal(0, spread, 3))
    ]


def ratio_of(low: float, high: float, *, inner: float = 0.8, processes: int = 3, blocks: int = 20) -> Ratio:
    """A ratio with this 95 % interval; `inner`: the share of it that the 90 % interval has."""
    freedom = brentq(lambda freedom: stdtrit(freedom, 0.95) / stdtrit(freedom, 0.975) - inner, 1, 1e9)
    error = math.log(high / low) / 2 / stdtrit(freedom, 0.975)
    return Ratio(math.sqrt(low * high), error, freedom, processes, blocks)


def test_ratio_is_the_mean_over_processes():
    reference = [[[200.0]] * 6, [[400.0]] * 6]
    mode = [[[100.0, 90.0, 500.0]] * 6, [[100.0]] * 6]
    # the medians of blocks are 200/100 in the first process and 400/100 in the second
    assert stats.speed_up(reference, mode).value == pytest.approx(math.sqrt(8))


def test_location_is_the_mean_of_the_undisturbed_half():
    assert stats.location(np.arange(20.0)) == pytest.approx(np.mean(np.arange(2, 10)))
    assert stats.location(np.array([5.0])) == 5.0
    calm = [[100.0 + index % 3] for index in range(40)]
    disturbed = [block if index % 2 else [1.9 * block[0]] for index, block in enumerate(calm)]
    ratio = stats.speed_up([calm] * 3, [disturbed] * 3)
    assert ratio.value == pytest.approx(1.0, abs=0.01), "a host that slows half of the blocks moves no ratio"


def test_intervals_are_students_t_over_processes():
    """95 % for a difference, 90 % for none: two tests at 5 % each."""
    log_ratios = np.array([0.01, 0.03, 0.08])
    ratio = stats.ratio_of_processes(0.04, [log_ratios], stats.UNKNOWN)
    error = np.std(log_ratios, ddof=1) / math.sqrt(3)
    assert math.log(ratio.value) == pytest.approx(0.04)
    # Student's t of two degrees of freedom, from a table
    assert math.log(ratio.high / ratio.value) == pytest.approx(4.303 * error, rel=1e-3)
    assert math.log(ratio.value / ratio.low) == pytest.approx(4.303 * error, rel=1e-3)
    assert ratio.half_width(stats.EQUIVALENCE_CONFIDENCE) == pytest.approx(2.920 * error, rel=1e-3)


def test_interval_of_one_process_uses_its_blocks():
    generator = np.random.default_rng(6)
    blocks = [[100.0 * math.exp(generator.normal(0, 0.02))] for _ in range(40)]
    ratio = stats.speed_up([blocks], [blocks[::-1]])
    assert ratio.low < 1 < ratio.high < 1.03
    assert ratio.error > 0.001
    assert stats.judge(ratio) is Verdict.AMBG


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.05])
def test_intervals_cover_a_known_ratio(spread):
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        reference, mode = (simulate(generator, median, 0.02, spread=spread) for median in (100.0, 80.0))
        ratio = stats.speed_up(reference, mode)
        covered += ratio.low <= 1.25 <= ratio.high
    assert 183 <= covered <= 197, "95 % of them, and not nearly all: they would be too wide"


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (ratio_of(1.01, 1.10), Verdict.FAST),
        (ratio_of(0.99, 1.10), Verdict.AMBG),
        (ratio_of(0.90, 0.99), Verdict.SLOW),
        (ratio_of(0.90, 1.001), Verdict.AMBG),
        (ratio_of(0.98, 1.02), Verdict.SAME),
        (ratio_of(1.005, 1.02), Verdict.SAME),
        (ratio_of(0.95, 1.02), Verdict.AMBG),
        (ratio_of(0.96, 1.04), Verdict.AMBG),
        (ratio_of(0.5, 2.0), Verdict.AMBG),
        (ratio_of(1.5, 2.0), Verdict.FAST),
        # Sameness needs ninety percent within the margin.
        (ratio_of(1 / 1.035, 1.035), Verdict.SAME),
        (ratio_of(1 / 1.04, 1.04), Verdict.AMBG),
        # Too few processes or blocks never decide.
        (ratio_of(2.0, 2.1, processes=2), Verdict.AMBG),
        (ratio_of(2.0, 2.1, blocks=2), Verdict.AMBG),
        (ratio_of(2.0, 2.1, blocks=3), Verdict.FAST),
    ],
)
def test_verdict_follows_from_interval_and_margin(ratio, verdict):
    assert stats.judge(ratio) is verdict


@pytest.mark.parametrize(
    ("reference", "mode"),
    [
        ([[[100.0, 110.0]]], [[[50.0]]]),  # one block
        ([[[1.0]] * 5, [[1e300]] * 5], [[[1e300]] * 5, [[1.0]] * 5]),
    ],
)
def test_interval_without_data_is_unbounded(reference, mode):
    ratio = stats.speed_up(reference, mode)
    assert (*ratio.interval(), *ratio.interval(0.9)) == (0.0, math.inf, 0.0, math.inf)


def test_sampling_ends_when_blocks_scatter_little():
    """Whatever the difference of modes is: otherwise sampling would end with an accidental finding."""
    generator = np.random.default_rng(4)
    quiet, noisy = ([[100.0 * math.exp(generator.normal(0, noise))] for _ in range(30)] for noise in (0.02, 0.3))
    for factor in (0.5, 0.98, 1.0, 1.02, 2.0):
        assert stats.narrow_enough(quiet, [[factor * block[0]] for block in quiet], processes=3)
    assert not stats.narrow_enough(quiet, noisy, processes=3)


TRUTHS = (0.5, 1.0, 2.0, 4.0) * 4
NO_TIMES = [[], [[]], [[1.0], [0.0]], [[float("nan")]], [[-1.0]], [[float("inf")]]]


def test_geometric_mean_and_its_interval():
    generator = np.random.default_rng(5)
    pairs = [(simulate(generator, 100.0, 0.02), simulate(generator, 100.0 / truth, 0.02)) for truth in TRUTHS]
    spread = spread_of_pairs(pairs, len(pairs) + 1)
    ratios = [stats.speed_up(*pair, spread) for pair in pairs]
    mean = stats.geometric_mean(ratios)
    assert mean.count == 16
    assert mean.value == pytest.approx(math.prod(ratio.value for ratio in ratios) ** (1 / 16))
    assert mean.low <= math.sqrt(2) <= mean.high
    assert mean.half_width() < min(ratio.half_width() for ratio in ratios)
    with pytest.raises(ValueError, match="at least one"):
        stats.geometric_mean([])


@pytest.mark.parametrize("wrong", NO_TIMES)
def test_samples_that_are_no_times_are_refused(wrong):
    with pytest.raises(ValueError, match="block"):
        stats.speed_up([wrong], [wrong])
    with pytest.raises(ValueError, match="block"):
        spread_of_pairs([([wrong] * 2, [wrong] * 2)], 2)
    with pytest.raises(ValueError, match="block"):
        stats.narrow_enough(wrong, wrong, 3)


ALL = [mode for mode in MODES.values() if not mode.captures_more]
PAIRS = [(place, ALL.index(MODES[name])) for place, mode in enumerate(ALL) for name in mode.compared_with]
"""(mode, baseline) of all modes that run where none is named."""


@pytest.mark.parametrize("hosts", [1.0, 10.0])
def test_differing_processes_make_no_mode_differ_from_itself(hosts):
    """Nor where some modes differ by `hosts` times as much from process to process as the others do."""
    generator = np.random.default_rng(3)
    wrong, widths = Counter(), Counter()
    workloads = 150
    for _ in range(workloads):
        spreads = [0.03 * hosts if mode.name == REFERENCE_MODE else 0.03 for mode in ALL]
        samples = [simulate(generator, 100.0, 0.0, blocks=3, spread=each) for each in spreads]
        pairs = [(samples[baseline], samples[mode]) for mode, baseline in PAIRS]
        spread = spread_of_pairs(pairs, len(samples))
        for key, known in (("alone", stats.UNKNOWN), ("together", spread)):
            for pair, (_, baseline) in zip(pairs, PAIRS, strict=True):
                ratio = stats.speed_up(*pair, known)
                wrong[key] += stats.judge(ratio) in (Verdict.FAST, Verdict.SLOW)
                if ALL[baseline].name != REFERENCE_MODE:
                    widths[key] += math.log(ratio.high / ratio.low)
    assert max(wrong.values()) / (workloads * len(PAIRS)) <= 0.06, "5 % but for chance"
    assert widths["together"] < (0.7 if hosts == 1 else 1.0) * widths["alone"], "it takes fewer processes to decide"


def test_similar_variances_are_pooled_and_others_are_not():
    generator = np.random.default_rng(4)

    def log_ratios(*deviations: float) -> list[list[np.ndarray]]:
        return [[generator.normal(0, deviation, 5)] for deviation in deviations]

    alike = stats.spread_of(log_ratios(*[0.02] * 12), 13)
    assert alike.variance == pytest.approx(0.0004, rel=0.3)
    assert alike.freedom == 12 * 4, "as much as 13 modes of five processes each tell, and no more"
    unlike = stats.spread_of(log_ratios(*[0.002, 0.2] * 6), 13)
    assert unlike.freedom < 2, "a ratio's own variance counts more"


def test_moments_give_back_the_distribution_of_variances():
    generator = np.random.default_rng(5)
    scale, freedom, own = 4e-4, 6.0, 4
    variances = scale * freedom / generator.chisquare(freedom, 4000)
    found = stats.spread_of([[generator.normal(0, math.sqrt(variance), own + 1)] for variance in variances], 10**6)
    assert found.variance == pytest.approx(scale, rel=0.1)
    assert found.freedom == pytest.approx(freedom, rel=0.15)


def test_one_process_or_pair_gives_no_variance():
    one, two = [[[100.0]] * 5], [[[100.0]] * 5, [[103.0]] * 5]
    assert spread_of_pairs([(one, one)] * 4, 4) == stats.UNKNOWN
    assert spread_of_pairs([(two, two)], 2) == stats.UNKNOWN
    assert spread_of_pairs([], 0) == stats.UNKNOWN
    assert spread_of_pairs([(two, two)] * 3, 3).freedom == 2


def test_ratio_has_the_larger_of_its_own_and_pooled_variance():
    log_ratios = np.array([0.0, 0.02, 0.04])
    own = 0.0004  # of two degrees of freedom

    def error(spread: stats.Spread) -> float:
        return stats.ratio_of_processes(0.02, [log_ratios], spread).error

    assert error(stats.UNKNOWN) == pytest.approx(math.sqrt(own / 3))
    assert error(stats.Spread(0.0010, 4)) == pytest.approx(math.sqrt((2 * own + 4 * 0.0010) / 6 / 3))
    assert error(stats.Spread(0.0001, 4)) == pytest.approx(math.sqrt(own / 3)), "never less than its own"


def test_change_between_two_sides_is_students_t_of_two_samples() -> None:
    """Computed by hand: variance 0.0002 with three degrees of freedom, of two processes and of three; t is 3.182."""
    base, new = np.array([0.01, -0.01]), np.array([0.01, 0.0, -0.01])
    assert stats.variance_within([base, new]) == (pytest.approx(0.0004 / 3), 3)
    change = stats.ratio_of_processes(0.0, [base, new], stats.UNKNOWN)
    assert math.log(change.high) == pytest.approx(3.182 * math.sqrt(0.0004 / 3 * (1 / 2 + 1 / 3)), rel=1e-3)
    assert change.low == pytest.approx(1 / change.high)
    one = np.array([0.0])
    assert stats.ratio_of_processes(0.0, [one, one], stats.UNKNOWN) is None
    assert stats.ratio_of_processes(0.0, [one, one], stats.Spread(1e-4, 5.0)) is not None
