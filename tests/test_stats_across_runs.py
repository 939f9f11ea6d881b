"""Ratios of programs that were measured one after another: on samples whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stats import NO_TIMES, TRUTHS, check_geometric_mean

from suite import stats_across_runs as stats

samples = st.floats(min_value=1.0, max_value=1e6, allow_nan=False)
blocks = st.lists(st.lists(samples, min_size=1, max_size=6), min_size=1, max_size=7)
quickly = settings(max_examples=40, deadline=None, derandomize=True)


def simulate(generator: np.random.Generator, median_us: float, noise: float, count: int = 8) -> list[list[float]]:
    """Make blocks of ten samples around a median, with noise on blocks and on samples."""
    return [
        list(median_us * math.exp(generator.normal(0, noise)) * np.exp(generator.normal(0, noise, 10)))
        for _ in range(count)
    ]


def test_ratio_is_that_of_the_geometric_means_of_medians():
    reference = [[200.0, 100.0, 300.0], [400.0]]
    assert stats.unpaired_ratio(reference, [[100.0, 90.0, 500.0], [100.0]]).value == pytest.approx(math.sqrt(8))


def test_samples_without_noise_give_no_width():
    ratio = stats.unpaired_ratio([[30.0] * 4] * 5, [[20.0] * 4] * 5)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.5, 1.5, 1.5))


@quickly
@given(blocks, blocks)
def test_interval_holds_the_estimate(reference, mode):
    ratio = stats.unpaired_ratio(reference, mode)
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio.blocks == min(len(reference), len(mode))


@quickly
@given(blocks, blocks)
def test_same_samples_and_seed_give_the_same_interval(reference, mode):
    first, second = (stats.unpaired_ratio(reference, mode, seed=(7,)) for _ in range(2))
    assert (first.value, first.low, first.high) == (second.value, second.low, second.high)


def test_intervals_cover_a_known_ratio():
    generator = np.random.default_rng(1)
    ratios = [
        stats.unpaired_ratio(simulate(generator, 130.0, 0.02), simulate(generator, 100.0, 0.02)) for _ in range(100)
    ]
    assert sum(ratio.low <= 1.3 <= ratio.high for ratio in ratios) >= 90


def test_one_block_has_an_open_interval():
    ratio = stats.unpaired_ratio([[2.0, 2.0]], [[1.0, 1.0]])
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 0.0, math.inf)


def test_geometric_mean_and_its_interval():
    generator = np.random.default_rng(5)
    check_geometric_mean(
        [
            stats.unpaired_ratio(
                simulate(generator, 100.0, 0.02), simulate(generator, 100.0 / truth, 0.02), seed=(number,)
            )
            for number, truth in enumerate(TRUTHS)
        ]
    )


@pytest.mark.parametrize("wrong", NO_TIMES)
def test_samples_that_are_no_times_are_refused(wrong):
    with pytest.raises(ValueError, match="block"):
        stats.unpaired_ratio(wrong, wrong)


def test_intervals_of_few_blocks_are_widened():
    """Replicates of known spread: with five blocks, sqrt(5 / 4) times as far out, and as far as t with four goes."""
    generator = np.random.default_rng(0)
    replicates = generator.normal(0.0, 0.01, 200_000)
    few, many = (stats._estimate(0.0, replicates, blocks) for blocks in (5, 10_000))
    assert math.log(many.high) == pytest.approx(1.96 * 0.01, rel=0.03)
    assert math.log(few.high) == pytest.approx(2.776 * 0.01 * math.sqrt(5 / 4), rel=0.03)
