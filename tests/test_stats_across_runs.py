"""Ratios, intervals and floors of cells of two runs: on samples whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stats import NO_TIMES, TRUTHS, check_geometric_mean

from suite import stats_across_runs as stats
from suite.stats import Verdict
from suite.stats_across_runs import RatioAcrossRuns

samples = st.floats(min_value=1.0, max_value=1e6, allow_nan=False)
blocks = st.lists(st.lists(samples, min_size=1, max_size=6), min_size=1, max_size=7)
paired_blocks = st.integers(1, 6).flatmap(
    lambda count: st.tuples(
        *(st.lists(st.lists(samples, min_size=1, max_size=5), min_size=count, max_size=count) for _ in range(2))
    )
)
quickly = settings(max_examples=40, deadline=None, derandomize=True)


def simulate(
    generator: np.random.Generator, median_us: float, drift: np.ndarray, noise: float, size: int = 10
) -> list[list[float]]:
    """Blocks of one mode: its own time, times the machine's drift in each block, with noise on blocks and samples."""
    return [
        list(median_us * factor * math.exp(generator.normal(0, noise)) * np.exp(generator.normal(0, noise, size)))
        for factor in drift
    ]


def ratio_of(low: float, high: float, blocks: int = 10) -> RatioAcrossRuns:
    return RatioAcrossRuns(math.sqrt(low * high), low, high, blocks, np.zeros(1))


def test_ratio_is_the_geometric_mean_of_the_blocks_ratios_of_medians():
    reference = [[200.0, 100.0, 300.0], [400.0]]
    mode = [[100.0, 90.0, 500.0], [100.0]]
    # medians 200/100 = 2 and 400/100 = 4
    assert stats.paired_ratio(reference, mode).value == pytest.approx(math.sqrt(8))


def test_samples_without_noise_give_an_interval_without_width():
    ratio = stats.paired_ratio([[30.0] * 4] * 5, [[20.0] * 4] * 5)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.5, 1.5, 1.5))


@quickly
@given(paired_blocks)
def test_interval_holds_the_estimate(sides):
    ratio = stats.paired_ratio(*sides)
    assert ratio.low <= ratio.value <= ratio.high


@quickly
@given(paired_blocks)
def test_swapping_the_modes_inverts_the_ratio(sides):
    reference, mode = sides
    there, back = stats.paired_ratio(reference, mode), stats.paired_ratio(mode, reference)
    assert there.value * back.value == pytest.approx(1)


@quickly
@given(paired_blocks, st.lists(st.floats(0.5, 2.0), min_size=6, max_size=6))
def test_what_slows_both_modes_in_a_block_cancels(sides, factors):
    reference, mode = sides
    slowed = [[[t * f for t in block] for block, f in zip(side, factors, strict=False)] for side in sides]
    calm, drifting = stats.paired_ratio(reference, mode), stats.paired_ratio(*slowed)
    assert (drifting.value, drifting.low, drifting.high) == pytest.approx((calm.value, calm.low, calm.high))


@quickly
@given(paired_blocks)
def test_same_samples_and_seed_give_the_same_interval(sides):
    first, second = stats.paired_ratio(*sides, seed=(7,)), stats.paired_ratio(*sides, seed=(7,))
    assert first == second
    assert np.array_equal(first.log_replicates, second.log_replicates)


@quickly
@given(st.floats(0.2, 5.0), st.integers(5, 12), st.floats(0.001, 0.05), st.integers(0, 10**6))
def test_a_known_ratio_lies_in_the_interval_or_within_the_noise_of_it(truth, count, noise, seed):
    generator = np.random.default_rng(seed)
    drift = np.exp(generator.normal(0, 0.1, count))
    reference = simulate(generator, 100.0, drift, noise)
    mode = simulate(generator, 100.0 / truth, drift, noise)
    ratio = stats.paired_ratio(reference, mode, seed=(seed,))
    margin = 1 + 2 * noise
    assert ratio.low / margin <= truth <= ratio.high * margin


@pytest.mark.parametrize("count", [5, 10])
def test_intervals_cover_a_known_ratio_as_often_as_they_say(count):
    generator = np.random.default_rng(1)
    covered = 0
    for trial in range(150):
        drift = np.exp(generator.normal(0, 0.1, count))
        reference = simulate(generator, 100.0, drift, 0.02)
        mode = simulate(generator, 80.0, drift, 0.02)
        ratio = stats.paired_ratio(reference, mode, seed=(trial,))
        covered += ratio.low <= 1.25 <= ratio.high
    assert covered / 150 >= 0.93


def test_pairing_is_worth_its_name_under_drift():
    generator = np.random.default_rng(2)
    drift = np.exp(np.linspace(0, 0.5, 8))
    reference, mode = (simulate(generator, median, drift, 0.005) for median in (100.0, 90.0))
    paired, unpaired = stats.paired_ratio(reference, mode), stats.unpaired_ratio(reference, mode)
    assert paired.value == pytest.approx(unpaired.value)
    assert paired.high - paired.low < (unpaired.high - unpaired.low) / 5


@quickly
@given(st.integers(5, 12), st.floats(0.001, 0.08), st.integers(0, 10**6))
def test_the_same_mode_is_neither_faster_nor_slower_than_itself(count, noise, seed):
    generator = np.random.default_rng(seed)
    drift = np.exp(generator.normal(0, 0.05, count))
    sides = [simulate(generator, 100.0, drift, noise) for _ in range(2)]
    floor = max(filter(None, map(stats.noise_floor, sides)))
    assert stats.judge(stats.paired_ratio(*sides, seed=(seed,)), floor) in (Verdict.SAME, Verdict.AMBG)


def test_clear_differences_are_called():
    generator = np.random.default_rng(3)
    drift = np.exp(generator.normal(0, 0.005, 8))
    base, fast, slow, same = (simulate(generator, median, drift, 0.003) for median in (100.0, 80.0, 120.0, 100.0))
    floor = stats.noise_floor(base)
    verdicts = [stats.judge(stats.paired_ratio(base, mode), floor) for mode in (fast, slow, same)]
    assert verdicts == [Verdict.FAST, Verdict.SLOW, Verdict.SAME]


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.03, 1.10, Verdict.FAST),
        (1.02, 1.10, Verdict.AMBG),
        (0.90, 0.98, Verdict.SLOW),
        (0.90, 0.981, Verdict.AMBG),
        (0.981, 1.02, Verdict.SAME),
        (0.97, 1.02, Verdict.AMBG),
        (0.5, 2.0, Verdict.AMBG),
    ],
)
def test_verdict_rule_with_a_floor_of_two_percent(low, high, verdict):
    assert stats.judge(ratio_of(low, high), 0.02) is verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.01, 0.08, Verdict.SLOW),
        (12.0, 90.0, Verdict.FAST),
        (0.5, 1.5, Verdict.AMBG),
        (0.94, 1.02, Verdict.AMBG),
        (0.96, 1.04, Verdict.SAME),
    ],
)
def test_on_a_noisy_machine_large_differences_are_called_and_loose_intervals_are_not_the_same(low, high, verdict):
    assert stats.judge(ratio_of(low, high), 1.6) is verdict


def test_too_few_blocks_or_no_floor_never_decide():
    assert stats.judge(ratio_of(2.0, 2.1, blocks=4), 0.01) is Verdict.AMBG
    assert stats.judge(ratio_of(2.0, 2.1), None) is Verdict.AMBG
    assert stats.judge(ratio_of(2.0, 2.1, blocks=5), 0.01) is Verdict.FAST


def test_one_block_has_an_open_interval():
    ratio = stats.paired_ratio([[100.0, 110.0]], [[50.0]])
    assert (ratio.low, ratio.high) == (0.0, math.inf)


def test_floor_is_what_neighbouring_blocks_differ_by():
    # one pair of neighbours, 100 against 110: |110/100 - 1|
    assert stats.noise_floor([[100.0], [110.0]]) == pytest.approx(0.10)
    assert stats.noise_floor([[100.0], [90.0]]) == pytest.approx(100 / 90 - 1)


def test_floor_takes_the_worse_way_to_pair_neighbours():
    # (0, 1) and (2, 3) agree; (1, 2) differ by a fifth
    assert stats.noise_floor([[100.0], [100.0], [120.0], [120.0]]) == pytest.approx(0.20)


def test_floors_have_a_minimum_and_need_two_blocks():
    assert stats.noise_floor([[100.0]] * 6) == stats.MINIMUM_FLOOR
    assert stats.drift_floor([[100.0]] * 6) == stats.MINIMUM_FLOOR
    assert stats.noise_floor([[100.0, 120.0]]) is None
    assert stats.drift_floor([[100.0, 120.0]]) is None


def test_drift_floor_is_the_range_of_block_medians():
    assert stats.drift_floor([[100.0], [110.0], [105.0], [130.0]]) == pytest.approx(0.30)


@quickly
@given(blocks)
def test_drift_floor_is_never_below_the_noise_floor(some_blocks):
    noise, drift = stats.noise_floor(some_blocks), stats.drift_floor(some_blocks)
    assert (noise is None) == (drift is None)
    assert noise is None or drift is None or drift >= noise * (1 - 1e-9)


def test_floor_of_many_blocks_is_not_random():
    generator = np.random.default_rng(4)
    some_blocks = simulate(generator, 100.0, np.ones(60), 0.01)
    assert stats.noise_floor(some_blocks) == stats.noise_floor(some_blocks)


def test_geometric_mean_and_its_interval():
    generator = np.random.default_rng(5)
    drift = np.ones(8)
    check_geometric_mean(
        [
            stats.paired_ratio(
                simulate(generator, 100.0, drift, 0.02), simulate(generator, 100.0 / truth, drift, 0.02), seed=(number,)
            )
            for number, truth in enumerate(TRUTHS)
        ]
    )


@pytest.mark.parametrize("wrong", NO_TIMES)
def test_samples_that_are_no_times_are_refused(wrong):
    with pytest.raises(ValueError, match="block"):
        stats.paired_ratio(wrong, wrong)
    with pytest.raises(ValueError, match="block"):
        stats.noise_floor(wrong)


def test_alternating_modes_must_have_equally_many_blocks():
    with pytest.raises(ValueError, match="1 and 2"):
        stats.paired_ratio([[1.0]], [[1.0], [2.0]])


def test_floor_is_the_95th_percentile_over_all_swaps_of_neighbours():
    """Five pairs, of which one differs, by a factor of e: every swap has a mean difference of a fifth, whatever its
    sign. With a second pair that differs less, swaps add up or cancel, and only their upper tail is the floor."""
    one = [[math.e], [1.0], [1.0], [1.0], [1.0], [1.0], [1.0], [1.0], [1.0], [1.0]]
    assert stats.noise_floor(one) == pytest.approx(math.expm1(0.2))
    two = [[math.e], [1.0], [1.0], [1.0], [1.0], [math.e**0.5], [1.0], [1.0], [1.0], [1.0]]
    assert stats.noise_floor(two) == pytest.approx(math.expm1(0.3))


def test_intervals_of_few_blocks_are_widened_for_their_number_and_have_the_tails_of_students_t():
    """Replicates of known spread: with two blocks, sqrt(2) times as far out, and as far as t with one degree goes."""
    generator = np.random.default_rng(0)
    replicates = generator.normal(0.0, 0.01, 200_000)
    few, many = (stats._estimate(0.0, replicates, blocks) for blocks in (5, 10_000))
    assert math.log(many.high) == pytest.approx(1.96 * 0.01, rel=0.03)
    assert math.log(few.high) == pytest.approx(2.776 * 0.01 * math.sqrt(5 / 4), rel=0.03)
