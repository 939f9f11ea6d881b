"""Ratios, intervals and verdicts of a run: on samples whose truth is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suite import stats
from suite.stats import Ratio, Verdict, enough_processes

times = st.floats(min_value=1.0, max_value=1e6, allow_nan=False)
process = st.lists(st.lists(times, min_size=1, max_size=4), min_size=1, max_size=7)
sides = st.integers(1, 3).flatmap(
    lambda count: st.tuples(*(st.lists(process, min_size=count, max_size=count) for _ in range(2)))
)
quickly = settings(max_examples=30, deadline=None, derandomize=True)


def simulate(
    generator: np.random.Generator, median_us: float, noise: float, blocks: int = 30, spread: float = 0.0
) -> list[list[list[float]]]:
    """Three processes of a mode with noise between blocks, and with `spread` between processes."""
    return [
        [[median_us * factor * math.exp(generator.normal(0, noise))] * 3 for _ in range(blocks)]
        for factor in np.exp(generator.normal(0, spread, 3))
    ]


def ratio_of(low: float, high: float, *, inner: float = 0.8, processes: int = 3, blocks: int = 20) -> Ratio:
    value = math.sqrt(low * high)
    inside = ((value / low) ** inner, (high / value) ** inner)
    return Ratio(value, low, high, value / inside[0], value * inside[1], processes, blocks, np.zeros(1))


def test_a_ratio_is_the_mean_over_processes_of_the_ratio_of_locations():
    reference = [[[200.0]] * 6, [[400.0]] * 6]
    mode = [[[100.0, 90.0, 500.0]] * 6, [[100.0]] * 6]
    # the medians of blocks are 200/100 in the first process and 400/100 in the second
    assert stats.speed_up(reference, mode).value == pytest.approx(math.sqrt(8))


def test_a_location_is_the_mean_of_the_undisturbed_half_without_its_lowest_tenth():
    assert stats.location(np.arange(20.0)) == pytest.approx(np.mean(np.arange(2, 10)))
    assert stats.location(np.array([5.0])) == 5.0


def test_the_intervals_are_those_between_the_quantiles_that_their_confidence_names():
    """95 % for a difference, 90 % for none: two tests at 5 % each."""
    replicates = np.linspace(-1.0, 1.0, 2001)
    ratio = stats.ratio_of(0.0, replicates, 3, 20)
    assert (math.log(ratio.low), math.log(ratio.high)) == pytest.approx((-0.95, 0.95))
    assert (math.log(ratio.same_low), math.log(ratio.same_high)) == pytest.approx((-0.90, 0.90))


def test_a_host_that_slows_half_of_the_blocks_of_one_mode_does_not_move_its_ratio():
    calm = [[100.0 + index % 3] for index in range(40)]
    disturbed = [block if index % 2 else [1.9 * block[0]] for index, block in enumerate(calm)]
    ratio = stats.speed_up([calm] * 3, [disturbed] * 3)
    assert ratio.value == pytest.approx(1.0, abs=0.01)


def test_samples_without_noise_give_an_interval_without_width():
    ratio = stats.speed_up([[[30.0] * 4] * 5] * 3, [[[20.0] * 4] * 5] * 3)
    assert (ratio.value, ratio.low, ratio.high, ratio.same_low) == pytest.approx((1.5, 1.5, 1.5, 1.5))


@quickly
@given(sides)
def test_intervals_hold_the_estimate_and_one_another(both):
    ratio = stats.speed_up(*both)
    assert ratio.low <= ratio.same_low <= ratio.value <= ratio.same_high <= ratio.high


@quickly
@given(sides)
def test_same_samples_and_seed_give_the_same_interval(both):
    first, second = stats.speed_up(*both, seed=(7,)), stats.speed_up(*both, seed=(7,))
    assert first == second
    assert np.array_equal(first.log_replicates, second.log_replicates)


@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_intervals_cover_a_known_ratio(spread):
    generator = np.random.default_rng(1)
    covered = 0
    for trial in range(100):
        reference, mode = (simulate(generator, median, 0.02, spread=spread) for median in (100.0, 80.0))
        ratio = stats.speed_up(reference, mode, seed=(trial,))
        covered += ratio.low <= 1.25 <= ratio.high
    assert covered >= (93 if spread == 0 else 80), "three processes tell little of how much processes differ"


def test_processes_that_differ_widen_the_interval_though_their_blocks_do_not():
    alike = stats.speed_up([[[100.0]] * 20] * 3, [[[100.0]] * 20] * 3)
    apart = stats.speed_up([[[100.0]] * 20] * 3, [[[time]] * 20 for time in (90.0, 100.0, 110.0)])
    assert alike.low == alike.high == 1
    assert apart.low < 0.95 and apart.high > 1.05
    assert stats.judge(apart) is Verdict.AMBG


def test_deviations_of_few_processes_are_widened_for_their_number():
    generator = np.random.default_rng(0)
    by_process = np.repeat([[-0.03], [0.0], [0.03]], 4000, axis=1)
    drawn = stats.resample_processes(by_process, 0.0, generator)
    # three of the three drawn with replacement: variance (0.03^2 * 2 / 3) / 3, times 3 / 2
    assert np.std(drawn) == pytest.approx(0.03 / math.sqrt(3), rel=0.03)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.01, 1.10, Verdict.FAST),
        (0.99, 1.10, Verdict.AMBG),
        (0.90, 0.99, Verdict.SLOW),
        (0.90, 1.001, Verdict.AMBG),
        (0.98, 1.02, Verdict.SAME),
        (1.005, 1.02, Verdict.SAME),
        (0.95, 1.02, Verdict.AMBG),
        (0.96, 1.04, Verdict.AMBG),
        (0.5, 2.0, Verdict.AMBG),
        (1.5, 2.0, Verdict.FAST),
    ],
)
def test_verdict_rule(low, high, verdict):
    assert stats.judge(ratio_of(low, high)) is verdict


def test_the_same_needs_ninety_percent_within_the_margin_and_not_ninety_five():
    assert stats.judge(ratio_of(1 / 1.035, 1.035, inner=0.8)) is Verdict.SAME
    assert stats.judge(ratio_of(1 / 1.035, 1.035, inner=0.95)) is Verdict.AMBG


def test_too_few_processes_or_blocks_never_decide():
    assert stats.judge(ratio_of(2.0, 2.1, processes=2)) is Verdict.AMBG
    assert stats.judge(ratio_of(2.0, 2.1, blocks=4)) is Verdict.AMBG
    assert stats.judge(ratio_of(2.0, 2.1, blocks=5)) is Verdict.FAST


def test_one_block_has_an_open_interval():
    ratio = stats.speed_up([[[100.0, 110.0]]], [[[50.0]]])
    assert (ratio.low, ratio.high, ratio.same_low, ratio.same_high) == (0.0, math.inf, 0.0, math.inf)


def test_sampling_ends_when_blocks_scatter_little_and_goes_on_while_they_scatter():
    generator = np.random.default_rng(3)
    quiet = [[100.0 * math.exp(generator.normal(0, 0.005))] for _ in range(20)]
    noisy = [[100.0 * math.exp(generator.normal(0, 0.3))] for _ in range(20)]
    assert stats.narrow_enough(quiet, quiet, processes=3)
    assert not stats.narrow_enough(quiet, noisy, processes=3)


def test_whether_it_is_narrow_enough_does_not_hang_on_how_the_modes_differ():
    """Or sampling would end with a chance finding."""
    generator = np.random.default_rng(4)
    blocks = [[100.0 * math.exp(generator.normal(0, 0.02))] for _ in range(30)]
    for factor in (0.5, 0.98, 1.0, 1.02, 2.0):
        assert stats.narrow_enough(blocks, [[factor * block[0]] for block in blocks], processes=3)


TRUTHS = (0.5, 1.0, 2.0, 4.0) * 4
NO_TIMES = [[], [[]], [[1.0], [0.0]], [[float("nan")]], [[-1.0]], [[float("inf")]]]


def check_geometric_mean(ratios):
    """Of ratios that were found for `TRUTHS`."""
    mean = stats.geometric_mean(ratios)
    assert mean.count == 16
    assert mean.value == pytest.approx(math.prod(ratio.value for ratio in ratios) ** (1 / 16))
    assert mean.low <= math.sqrt(2) <= mean.high
    widths = [math.log(ratio.high / ratio.low) for ratio in ratios]
    assert math.log(mean.high / mean.low) < min(widths)


def test_geometric_mean_and_its_interval():
    generator = np.random.default_rng(5)
    check_geometric_mean(
        [
            stats.speed_up(simulate(generator, 100.0, 0.02), simulate(generator, 100.0 / truth, 0.02), seed=(number,))
            for number, truth in enumerate(TRUTHS)
        ]
    )


def test_geometric_mean_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        stats.geometric_mean([])


@pytest.mark.parametrize("wrong", NO_TIMES)
def test_samples_that_are_no_times_are_refused(wrong):
    with pytest.raises(ValueError, match="block"):
        stats.speed_up([wrong], [wrong])
    with pytest.raises(ValueError, match="block"):
        stats.narrow_enough(wrong, wrong, 3)


def test_modes_must_have_equally_many_processes():
    with pytest.raises(ValueError, match="1 and 2"):
        stats.speed_up([[[1.0]]], [[[1.0]], [[2.0]]])


def test_more_processes_are_wanted_where_ratios_are_wide_on_the_whole() -> None:
    def ratio(half_width: float) -> Ratio:
        low, high = math.exp(-half_width), math.exp(half_width)
        return Ratio(1.0, low, high, low, high, 3, 20, np.zeros(1))

    assert enough_processes([])
    assert enough_processes([ratio(0.019)] * 4)
    assert not enough_processes([ratio(0.021)] * 4)
    assert not enough_processes([ratio(0.001), ratio(0.04)]), "one that is narrow by chance is not enough"
    assert enough_processes([ratio(0.03), *[ratio(0.001)] * 9])
    wide = [replace(ratio(0.027), processes=2)] * 4
    assert not enough_processes(wide)
    assert enough_processes(wide, more=1), "half-widths of three such processes are smaller by a factor of 0.71"
    assert not enough_processes([replace(ratio(0.029), processes=2)] * 4, more=1)
    assert enough_processes([replace(ratio(0.019), processes=1)] * 4), "of one process nothing is known but its own"


SIX_MODES = [(1, 0), (2, 0), (2, 1), (3, 0), (3, 2), (4, 0), (4, 3), (5, 0), (5, 4)]
"""(mode, baseline) of six modes with CUDA graphs."""


def test_processes_that_differ_are_no_reason_to_find_a_mode_to_differ_from_itself():
    """Three processes that agree by chance must not decide what others of the workload show to be noise."""
    generator, found = np.random.default_rng(3), {"alone": 0, "together": 0}
    workloads = 40
    for workload in range(workloads):
        samples = [simulate(generator, 100.0, 0.01, spread=0.03) for _ in range(6)]
        pairs = [(samples[baseline], samples[mode]) for mode, baseline in SIX_MODES]
        spread = stats.process_spread(pairs, len(samples))
        for key, least in (("alone", 0.0), ("together", spread)):
            judged = [stats.judge(stats.speed_up(*pair, seed=(workload,), spread=least)) for pair in pairs]
            found[key] += sum(verdict in (Verdict.FAST, Verdict.SLOW) for verdict in judged)
    share = {key: count / (workloads * len(SIX_MODES)) for key, count in found.items()}
    assert share["together"] <= 0.08 and share["alone"] > 0.12


def test_the_spread_of_processes_is_that_of_all_pairs():
    def apart(*times: float) -> list[list[list[float]]]:
        return [[[time]] * 10 for time in times]

    calm, wide = apart(100, 100, 100), apart(100 / math.e, 100, 100 * math.e)
    many = 10**6  # modes: Student's t is the normal distribution then
    assert stats.process_spread([(calm, wide)], many) == pytest.approx(1.0)
    assert stats.process_spread([(calm, wide), (calm, calm)], many) == pytest.approx(math.sqrt(0.5))
    assert stats.process_spread([(calm, wide)], 2) == pytest.approx(4.303 / 1.960, rel=1e-3), (
        "of two degrees of freedom"
    )
    assert stats.process_spread([], 2) == stats.process_spread([(apart(100), apart(90))], 2) == 0.0


@pytest.mark.parametrize("times", [(99.0, 100.0, 101.0), (100.0, 100.0, 100.0), (100.0, 104.0)])
def test_processes_are_taken_to_differ_by_no_less_than_the_spread(times):
    reference = [[[100.0]] * 20 for _ in times]
    mode = [[[time]] * 20 for time in times]
    narrow, wide = stats.speed_up(reference, mode), stats.speed_up(reference, mode, spread=0.05)
    assert wide.value == pytest.approx(narrow.value)
    assert math.log(wide.high / wide.low) >= math.log(narrow.high / narrow.low)
    assert np.std(wide.log_replicates) == pytest.approx(0.05 / math.sqrt(len(times)), rel=0.1)
    same = stats.speed_up(reference, mode, spread=1e-9)
    assert (same.low, same.high) == pytest.approx((narrow.low, narrow.high))
