"""A candidate that is the fastest in most calls and not in all of them together is not kept for what most calls say."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from simulated_timings import Weather, decided

from optimizations.selection.decide import Rules, judge
from optimizations.selection.period import Period
from optimizations.selection.selector import Selector
from optimizations.selection.totals import (
    FEWEST,
    OUTLIER,
    clipped_mean,
    doubtful,
    errors_against,
    seeming_errors_against,
    sure,
)

Longer = Callable[[random.Random, int], bool]


def seldom(share: float) -> Longer:
    return lambda chance, call: chance.random() < share


def every(period: int) -> Longer:
    return lambda chance, call: call % period == 0


def kept(longer: Longer, times: float, seed: int) -> str:
    """Of a candidate that is 5 % faster than the other but in some of its calls, which take so many times as long."""
    selector, chance = Selector(("none", "copy"), seed=seed), random.Random(seed)
    call = seed
    while (turn := selector.next_turn()) is not None:
        call += 1
        seconds = (1.0 if turn.candidate == "none" else 1.05) * math.exp(chance.gauss(0, 0.03))
        if turn.candidate == "none" and longer(chance, call):
            seconds *= times
        selector.record(turn, seconds * 1e-3)
    assert selector.decision is not None
    return selector.decision.kept


@pytest.mark.parametrize(
    ("longer", "times", "least"),
    [
        (seldom(0.05), 10.0, 0.65),
        (seldom(0.1), 20.0, 0.9),
        (seldom(0.2), 20.0, 0.95),
        (seldom(0.3), 20.0, 0.95),
        (every(3), 1.4, 0.95),
        (every(5), 1.8, 0.95),
        (every(8), 2.2, 0.75),
    ],
    ids=["twentieth", "tenth", "fifth", "third", "each third", "each fifth", "each eighth"],
)
def test_what_is_fastest_in_most_calls_and_slowest_in_sum_is_not_kept(
    longer: Longer, times: float, least: float
) -> None:
    """It has to allocate in some calls, or to follow inputs that move in some. All medians speak for it."""
    assert sum(kept(longer, times, seed) == "copy" for seed in range(30)) >= least * 30


@pytest.mark.parametrize("weather", [Weather(noise=0.03, outliers=0.03), Weather(noise=0.05, regimes=0.03)], ids=str)
def test_outliers_that_all_candidates_have_decide_nothing(weather: Weather) -> None:
    found = [decided({"none": 1.0, "copy": 1.0}, weather, seed).decision for seed in range(60)]
    same = [one for one in found if one is not None and (one.kept, one.outcome) == ("none", "same")]
    assert len(same) >= 0.95 * len(found)
    for faster in ("none", "copy"):
        truth = {name: 1.0 if name == faster else 1.1 for name in ("none", "copy")}
        assert {one.kept for one in (decided(truth, weather, seed).decision for seed in range(60)) if one} == {faster}


def test_a_call_that_the_machine_held_up_counts_for_a_few_at_most() -> None:
    assert clipped_mean([(0, 1.0), (1, 3600.0), (2, 1.0)], 1.0) == (2 + OUTLIER) / 3
    assert clipped_mean([(0, 1.0), (1, 2.0)], 1.0) == 1.5


def test_what_is_dear_for_all_candidates_is_taken_out_of_sums() -> None:
    period = Period(ratios=(10.0, 0.1), offsets=(9.0, -9.0))
    assert clipped_mean([(4, 20.0), (5, 2.0)], 2.0, period) == 11.0
    assert clipped_mean([(4, 20.0)], 2.0, period) == 11.0, "a large batch is no call that the machine held up"


def test_standard_errors_by_hand() -> None:
    """Differences of 1, 2 and 3, three times each: their sum is 18, and the root of their squares' sum is sqrt(42)."""
    rounds = [{"a": 10.0 + more, "b": 10.0} for more in (1, 2, 3) * 3]
    assert errors_against("a", "b", [*rounds, {"b": 5.0}], 0.0175) == pytest.approx(18 / math.sqrt(42))
    assert errors_against("b", "a", rounds, 0.0175) == 0.0
    assert errors_against("a", "b", rounds, 0.2) == 0.0, "no more than the margin"
    assert errors_against("a", "b", rounds[: FEWEST - 1], 0.0175) == 0.0, "of so few their error is not known"
    assert errors_against("a", "b", [{"a": 2.0, "b": 1.0}] * FEWEST, 0.0175) == pytest.approx(math.sqrt(FEWEST))


def test_candidates_that_are_alike_are_sure_to_differ_as_seldom_as_is_said() -> None:
    """Rare and large times, which no normal distribution has."""
    chance, error, found = random.Random(4), 0.02, 0
    for _ in range(2000):
        rounds = [{name: 1.0 + 100 * (chance.random() < 0.1) for name in "ab"} for _ in range(40)]
        found += errors_against("a", "b", rounds, 0.0) > sure(error)
    assert found <= 2000 * error


def test_slow_regimes_raise_no_doubt_and_single_calls_do() -> None:
    """Blocks that took twice as long as a whole are in sums, and say nothing of what is seldom."""
    slow = [{"a": 1.0, "b": 2.0} if place % 2 else {"a": 2.0, "b": 1.0} for place in range(15)]
    assert seeming_errors_against("a", "b", slow, slow, 1.0, 0.0175) == 0.0
    means = [{**one, "a": 10 / 3} if place == 4 else one for place, one in enumerate(slow)]
    assert seeming_errors_against("a", "b", means, slow, 1.0, 0.0175) > doubtful(15)
    assert seeming_errors_against("a", "b", means, slow, 1.01, 0.0175) > doubtful(15)
    assert seeming_errors_against("a", "b", means, slow, 0.8, 0.0175) == 0.0, "what it gains is more"


def test_sums_that_are_in_doubt_hold_a_verdict_back_and_sums_that_are_sure_are_one() -> None:
    rounds = [{"a": 1.0, "b": 1.1}] * 19
    rules = Rules(least_gain_s=0)

    def means(longer: float, times: int) -> list[dict[str, float]]:
        return [{"a": 1.0 + (longer if place < times else 0.0), "b": 1.1} for place in range(19)]

    assert judge(("a", "b"), rounds, rules, means=means(0.0, 0)).left == ("a",)
    doubtful_ones = means(2.3, 2)
    assert errors_against("a", "b", doubtful_ones, rules.margin) < sure(rules.error_per_look(2))
    assert judge(("a", "b"), rounds, rules, means=doubtful_ones).left == ("a", "b")
    assert judge(("a", "b"), rounds, rules, means=means(2.0, 18)).left == ("b",)
    found = judge(("a", "b"), rounds, rules, means=means(4.0, 6), at_the_end=True).decision
    assert found is not None
    assert found.kept == "b"


def test_slow_calls_of_which_a_block_may_have_two_are_seen_in_sums() -> None:
    """The median of such a block is slow, too. A fifth of calls takes 1.5 times as long, which is 1.06 in sum."""
    wrong = 0
    for seed in range(30):
        chance = random.Random(f"{seed}")
        selector = Selector(("none", "copy"), seed=seed)
        while (turn := selector.next_turn()) is not None:
            seconds = math.exp(chance.gauss(0, 0.03)) * 1e-3
            if turn.candidate == "copy":
                seconds *= 1.5 if chance.random() < 0.2 else 0.95
            selector.record(turn, seconds)
        assert selector.decision is not None
        wrong += selector.decision.kept == "copy"
    assert wrong <= 9, "14 by medians and what stands out in blocks"
