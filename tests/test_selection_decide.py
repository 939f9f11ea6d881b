"""The decision on simulated times: what is kept is never much slower than the best, and equals are the same."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import interrupted_at
from simulated_timings import FAIR, FOUL, Weather, decided

from optimizations.selection.decide import Rules, block_median, compare, hopeless, judge
from optimizations.selection.interval import fewest, paired_interval
from optimizations.selection.schedule import turns
from optimizations.selection.selector import FEWEST_ROUNDS, MOST_VOIDS, Selector

NAMES = ("none", "copy", "indirection")
ALLOWED = 1.02
"""What is kept takes at most this many times the time of the best."""


def steady(examples: int) -> settings:
    """The same examples in every run: a test that fails once in many runs says nothing."""
    return settings(deadline=None, derandomize=True, database=None, max_examples=examples)


WEATHERS = st.builds(
    Weather,
    noise=st.floats(0.001, 0.05),
    drift=st.floats(-0.3, 0.5),
    outliers=st.floats(0, 0.04),
    warm_up=st.integers(0, 4),
    regimes=st.floats(0, 0.03),
    period=st.sampled_from([0, 0, 2, 3, 5, 8]),
    echo=st.floats(0, 0.4),
)


@steady(150)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=3),
    WEATHERS,
    st.integers(0, 2**32),
)
def test_what_is_kept_is_hardly_slower_than_the_best(times: list[float], weather: Weather, seed: int) -> None:
    truth = dict(zip(NAMES, times, strict=False))
    selector = decided(truth, weather, seed)
    decision = selector.decision
    assert decision is not None
    assert selector.spent.calls <= selector.rules.most_calls + 3 * selector.rules.block_calls
    assert truth[decision.kept] / min(times) <= ALLOWED, (decision, truth)


@steady(150)
@given(st.floats(-0.06, 0.06), st.floats(-0.06, 0.06), WEATHERS, st.integers(0, 2**32))
def test_close_calls_are_decided_within_the_margin(first: float, second: float, weather: Weather, seed: int) -> None:
    """Differences around the margin, where a verdict is the hardest."""
    truth = {"none": 1.0, "copy": 1.0 + first, "indirection": 1.0 + second}
    decision = decided(truth, weather, seed).decision
    assert decision is not None
    assert truth[decision.kept] / min(truth.values()) <= ALLOWED, (decision, truth)


@pytest.mark.parametrize(
    ("weather", "count"), [(FAIR, 2), (FAIR, 3), (FOUL, 2), (FOUL, 3), (Weather(noise=0.05), 2)], ids=str
)
def test_copies_of_one_distribution_are_the_same(weather: Weather, count: int) -> None:
    runs = [decided(dict.fromkeys(NAMES[:count], 1.0), weather, seed).decision for seed in range(60)]
    same = [one for one in runs if one is not None and (one.outcome, one.kept) == ("same", "none")]
    assert len(same) >= 0.95 * len(runs)


@pytest.mark.parametrize(("noise", "count", "calls"), [(0.05, 2, 900), (0.05, 3, 1900), (0.01, 3, 260)])
def test_equal_candidates_are_told_in_so_many_calls(noise: float, count: int, calls: int) -> None:
    """Calls that are measured are slower ones where the program runs ahead of its device."""
    runs = [decided(dict.fromkeys(NAMES[:count], 1.0), Weather(noise=noise), seed).spent.calls for seed in range(30)]
    assert sorted(runs)[len(runs) // 2] <= calls


@pytest.mark.parametrize(("slower", "kept"), [(1.005, "b"), (1.012, "a"), (1.03, "a")])
def test_a_guess_keeps_what_serves_without_selection_within_half_the_margin(slower: float, kept: str) -> None:
    """A guess is less sure than the verdict that the margin is made for."""
    found = judge(("a", "b"), [{"a": 1.0, "b": slower}] * 3, Rules(), at_the_end=True).decision
    assert found is not None
    assert (found.kept, found.outcome) == (kept, "unresolved")


def test_of_copies_that_cannot_be_told_apart_in_time_the_one_that_serves_without_selection_is_kept() -> None:
    rules = Rules(most_calls=600)
    runs = [decided(dict.fromkeys(NAMES, 1.0), Weather(noise=0.05), seed, rules).decision for seed in range(60)]
    assert {one.outcome for one in runs if one is not None} == {"same", "unresolved"}
    unresolved = [one.kept for one in runs if one is not None and one.outcome == "unresolved"]
    assert unresolved.count("indirection") >= 0.8 * len(unresolved) > 0


@pytest.mark.parametrize("truth", [{"none": 1.1, "copy": 1.0}, {"none": 1.0, "copy": 1.1}], ids=["faster", "slower"])
@pytest.mark.parametrize("weather", [Weather(noise=0.05), Weather(noise=0.05, drift=0.3, warm_up=3, echo=0.2)], ids=str)
def test_ten_percent_at_five_percent_noise_take_at_most_two_hundred_calls(
    truth: dict[str, float], weather: Weather
) -> None:
    for seed in range(200):
        selector = decided(truth, weather, seed)
        assert selector.spent.calls <= 200, seed
        assert selector.decision is not None
        assert truth[selector.decision.kept] == 1.0
        assert selector.decision.outcome == ("faster" if selector.decision.kept == "copy" else "same")


@pytest.mark.parametrize("best", NAMES)
def test_three_candidates_take_hardly_ever_more(best: str) -> None:
    """The second look comes before two hundred calls are over."""
    truth = {name: 1.0 if name == best else 1.1 for name in NAMES}
    found = [decided(truth, Weather(noise=0.05), seed) for seed in range(100)]
    assert {one.decision.kept for one in found if one.decision is not None} == {best}
    assert sum(one.spent.calls <= 200 for one in found) >= 95
    assert max(one.spent.calls for one in found) <= 260


def test_a_candidate_that_is_much_slower_is_dropped_early_and_called_no_more() -> None:
    selector = decided({"none": 2.0, "copy": 1.0, "indirection": 1.005}, Weather(noise=0.05), seed=5)
    assert selector.decision is not None
    assert "none" in selector.decision.dropped
    calls = selector.measured_calls
    assert calls["none"] < 80
    assert calls["copy"] == calls["indirection"] > 1.5 * calls["none"]


def test_quiet_times_take_few_calls() -> None:
    selector = decided(dict.fromkeys(NAMES, 1.0), Weather(noise=0.003), seed=1)
    assert selector.spent.calls <= 170


def test_a_clock_that_ticks_coarsely_decides() -> None:
    rules = Rules(least_gain_s=0)
    assert judge(("a", "b"), [{"a": 1e-6, "b": 1e-6}] * 20, rules).decision.outcome == "same"  # type: ignore[union-attr]
    found = judge(("a", "b"), [{"a": 2e-6, "b": 1e-6}] * 20, rules).decision
    assert found is not None
    assert (found.kept, found.outcome) == ("b", "faster")


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        ((45, 49, 41), "none"),
        ((47, 49, 41), "indirection"),
        ((45, 40.5, 49), "none"),
        ((60, 45, 43), "indirection"),
        ((60, 43, 43), "copy"),
        ((1000, 996, 996), "none"),
        ((1000, 970, 960), "indirection"),
        ((40, 41, 41), "none"),
    ],
)
def test_a_few_microseconds_are_no_reason_for_a_graph(times: tuple[float, ...], kept: str) -> None:
    """They are lost to selection's own work around each call. Between two graphs they count."""
    rounds = [dict(zip(("none", "copy", "indirection"), (one * 1e-6 for one in times), strict=True))] * 20
    found = judge(("none", "copy", "indirection"), rounds, Rules()).decision
    assert found is not None
    assert found.kept == kept


def test_a_budget_ends_measuring_with_the_best_guess() -> None:
    truth = {"none": 1.07, "copy": 1.0}
    weather = Weather(noise=0.02)
    free = decided(truth, weather, seed=3)
    selector = decided(truth, weather, seed=3, budget_s=0.0015)
    assert selector.decision is not None
    assert (selector.decision.kept, selector.decision.outcome) == ("copy", "unresolved")
    assert not selector.says_little
    assert selector.spent.calls < free.spent.calls
    assert selector.spent.excess_s > 0.0015
    (comparison,) = selector.decision.comparisons
    assert comparison.ratio.estimate == pytest.approx(1.07, rel=0.03)
    assert comparison.ratio.high == math.inf, "so few rounds bound nothing"


def test_what_is_hopelessly_slow_is_given_up_before_it_has_used_the_budget_up() -> None:
    """The first candidate is far slower, so that its rounds cost the most; the others are hard to tell apart."""
    truth = {"none": 4.0, "copy": 1.05, "indirection": 1.0}
    weather = Weather(noise=0.02)
    right = 0
    for seed in range(60):
        selector = decided(truth, weather, seed, budget_s=0.1)
        assert selector.decision is not None
        assert "none" in selector.decision.dropped
        assert selector.measured_calls["none"] <= 20
        assert selector.spent.excess_s <= 0.1 * 1.2
        assert {one.other for one in selector.decision.comparisons} >= {"none"}
        right += (selector.decision.kept, selector.decision.outcome) == ("indirection", "faster")
    assert right >= 57


def test_a_candidate_that_is_the_only_one_left_is_kept_and_said_to_be_faster() -> None:
    selector = decided({"none": 3.0, "copy": 1.0}, FAIR, seed=3, budget_s=0.03)
    assert selector.decision is not None
    assert (selector.decision.kept, selector.decision.outcome) == ("copy", "faster")
    assert selector.decision.dropped == {"none"}
    assert selector.spent.rounds < FEWEST_ROUNDS
    assert selector.spent.excess_s < 0.03, "a budget that three rounds would overdraw is kept"


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("slow", NAMES)
def test_a_budget_smaller_than_a_round_is_overdrawn_by_a_block_at_most(slow: str, count: int) -> None:
    """Calls of a second each: three rounds would cost a minute more."""
    if slow not in NAMES[:count]:
        return
    truth = {name: 1300.0 if name == slow else 1000.0 for name in NAMES[:count]}
    for seed in range(20):
        selector = decided(truth, Weather(noise=0.01), seed, budget_s=0.5)
        assert selector.decision is not None
        assert selector.spent.excess_s <= 0.5 + selector.rules.block_calls * 0.3 * 1.1
        assert selector.says_little
        assert (selector.decision.kept, selector.decision.outcome) == (NAMES[count - 1], "unresolved")
        assert selector.decision.dropped == set(), "30 % in one block say nothing"


def test_a_budget_smaller_than_a_round_leaves_what_is_hopeless() -> None:
    """The last candidate is how calls were served before; it is given up where it is far slower than another."""
    for seed in range(20):
        selector = decided({"none": 1000.0, "copy": 3000.0}, Weather(noise=0.05), seed, budget_s=0.5)
        assert selector.decision is not None
        assert selector.decision.kept == "none"
        assert selector.spent.excess_s <= 0.5 + selector.rules.block_calls * 2.0 * 1.2


@pytest.mark.parametrize("budget_s", [1e-3, 6e-3, 12e-3, 30e-3, 0.2])
@pytest.mark.parametrize("cold", [("none",), ("none", "copy")], ids=str)
@pytest.mark.parametrize(("calls", "longer"), [(4, 3.0), (8, 3.0), (4, 20.0), (8, 20.0)])
def test_first_calls_that_are_slow_use_a_budget_up_and_speak_for_no_verdict_of_later_processes(
    budget_s: float, cold: tuple[str, ...], calls: int, longer: float
) -> None:
    """A candidate loads kernels and allocates in its first calls; the last one has done so before."""
    for seed in range(20):
        selector, chance = Selector(NAMES, budget_s=budget_s, seed=seed), random.Random(seed)
        while (turn := selector.next_turn()) is not None:
            served = (turn.round * selector.rules.block_calls) + turn.place
            first = longer if turn.candidate in cold and served < calls else 1.0
            best = 1.0 if turn.candidate == "none" else 1.1
            selector.record(turn, 1e-3 * first * best * math.exp(chance.gauss(0, 0.03)))
        assert selector.decision is not None
        if selector.is_worth_keeping:
            assert selector.decision.kept == "none"
        if not selector.spent.rounds:
            assert (selector.decision.kept, selector.decision.outcome) == ("indirection", "unresolved")


@pytest.mark.parametrize("copy", [0.2, 1.5, 4.0])
def test_what_has_served_so_far_is_given_up_for_the_fastest_of_the_others(copy: float) -> None:
    """In the first round already, of those that had their turn: its own first calls are long over."""
    truth = {"none": 1.0, "copy": copy, "indirection": 20.0}
    for seed in range(20):
        selector = decided(truth, Weather(noise=0.03), seed, budget_s=30e-3)
        assert selector.decision is not None
        assert selector.decision.kept == min(selector.medians, key=truth.__getitem__)
        assert not selector.is_worth_keeping


@pytest.mark.parametrize(
    ("budget_s", "little", "worth_keeping"), [(0.00005, True, False), (0.0006, False, False), (0.004, False, True)]
)
def test_a_guess_without_bounds_is_not_for_later_processes(budget_s: float, little: bool, worth_keeping: bool) -> None:
    """A process whose compile cache was warm has a small budget; others may have a larger one."""
    selector = decided({"none": 1.02, "copy": 1.0}, Weather(noise=0.05), seed=8, budget_s=budget_s)
    assert selector.decision is not None
    assert selector.decision.outcome == "unresolved"
    assert (selector.says_little, selector.is_worth_keeping) == (little, worth_keeping), selector.spent


def test_what_stopped_the_program_was_no_candidate() -> None:
    """A debugger, a suspended machine: one call of an hour does not use a minute's budget up."""
    selector = Selector(["a", "b"], budget_s=60.0)
    for call in itertools.count():
        turn = selector.next_turn()
        if turn is None:
            break
        selector.record(turn, 3600.0 if call == 70 else 1e-3 if turn.candidate == "a" else 1.1e-3)
    assert selector.decision is not None
    assert (selector.decision.kept, selector.decision.outcome) == ("a", "same")
    assert selector.spent.excess_s < 0.1
    assert selector.spent.seconds > 3600


@pytest.mark.parametrize("count", [2, 3])
def test_calls_of_seconds_are_not_measured_for_minutes(count: int) -> None:
    """Three rounds that count, and a guess by them, where sixty seconds are no more than that."""
    for slow in NAMES[:count]:
        truth = {name: 2200.0 if name == slow else 2000.0 for name in NAMES[:count]}
        for seed in range(10):
            selector = decided(truth, Weather(noise=0.01), seed)
            assert selector.decision is not None
            assert (selector.decision.outcome, selector.ended_by, selector.rounds) == ("unresolved", "time", 3)
            assert selector.decision.kept != slow
            assert selector.spent.seconds <= 2 * selector.rules.most_s
            assert not selector.is_worth_keeping


def test_calls_of_a_minute_are_hardly_measured_at_all() -> None:
    selector = decided({"none": 60_000.0, "copy": 60_000.0}, Weather(noise=0.01), seed=0)
    assert (selector.spent.calls, selector.says_little, selector.ended_by) == (4, True, "time")
    assert selector.decision is not None
    assert selector.decision.kept == "copy"


def test_a_machine_that_was_suspended_has_not_used_the_time_up() -> None:
    selector = Selector(["a", "b"])
    while (turn := selector.next_turn()) is not None:
        suspended = turn.call in (5, 30)
        selector.record(turn, 7200.0 if suspended else 1e-3 if turn.candidate == "a" else 1.1e-3)
    assert (selector.ended_by, selector.spent.seconds > 7200) == ("certainty", True)


@pytest.mark.parametrize(
    ("times", "rules", "budget_s", "ended_by"),
    [
        ((1.0, 1.1), Rules(), None, "certainty"),
        ((1.0, 1.0), Rules(most_calls=150), None, "calls"),
        ((1.0, 1.01), Rules(most_s=0.2), None, "time"),
        ((1.0, 1.2), Rules(), 1e-3, "cost"),
    ],
)
def test_what_ended_measuring_is_told(
    times: tuple[float, float], rules: Rules, budget_s: float | None, ended_by: str
) -> None:
    selector = decided(dict(zip(NAMES, times, strict=False)), Weather(noise=0.05), 2, rules, budget_s)
    assert selector.ended_by == ended_by
    assert selector.void("a reason")
    assert selector.ended_by == ("cost" if budget_s is not None else None), "what is used up stays used up"


def test_few_rounds_give_up_only_what_is_far_behind() -> None:
    rounds = [{"a": 1.0, "b": 1.6, "c": 2.5}] * 3
    assert [hopeless("abc", rounds[:count]) for count in range(4)] == [set(), {"c"}, {"b", "c"}, {"b", "c"}]
    assert hopeless("abc", [*rounds, {"a": 1.0, "b": 1.1, "c": 2.5}]) == {"c"}, "in every round"
    assert hopeless("ab", [{"a": 1.0, "b": 1.0}] * 3) == set()


def test_equal_candidates_are_hardly_ever_hopeless() -> None:
    """A budget that ends at the first chance: noise of 5 % makes nothing hopeless, and the verdict is a guess."""
    found = [decided(dict.fromkeys(NAMES, 1.0), Weather(noise=0.05), seed, budget_s=1e-9) for seed in range(400)]
    dropped = [one for one in found if one.decision is not None and one.decision.dropped]
    assert len(dropped) <= 4


def test_excess_is_what_the_slower_candidates_took_more() -> None:
    selector = Selector(["a", "b"], Rules(block_calls=2, lead_in_calls=0))
    for _ in range(20):
        turn = selector.next_turn()
        assert turn is not None
        selector.record(turn, 1.0 if turn.candidate == "a" else 3.0)
    calls = selector.measured_calls
    assert selector.spent.seconds == calls["a"] + 3.0 * calls["b"]
    assert selector.spent.excess_s == 2.0 * calls["b"]
    assert selector.medians == {"a": 1.0, "b": 3.0}


def test_hundreds_of_graphs_do_not_keep_their_times_for_ever() -> None:
    """A program of 300 graphs whose verdicts were hard to reach: some megabytes of the host's."""
    decided(dict.fromkeys(NAMES, 1.0), Weather(noise=0.05), 0)  # what is kept for all of them
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        decided_ones = [decided(dict.fromkeys(NAMES, 1.0), Weather(noise=0.05), seed) for seed in range(4)]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    calls = sum(one.spent.calls for one in decided_ones)
    assert calls > 2000
    assert after - before < 80 * calls


# What counts


def test_the_first_calls_of_a_block_do_not_count_however_long_they_take() -> None:
    rules = Rules(block_calls=4, lead_in_calls=1)
    assert block_median([9.0, 1.0, 2.0, 3.0], rules) == block_median([0.1, 3.0, 1.0, 2.0], rules) == 2.0
    assert block_median([9.0, 9.0, 1.0, 3.0], Rules(block_calls=4, lead_in_calls=2)) == 2.0


@pytest.mark.parametrize("block", [[1.0], [1.0] * 5, [1.0, 1.0, 0.0, 1.0], [1.0, 1.0, -1.0, 1.0], [1, 1, math.nan, 1]])
def test_blocks_that_are_not_whole_or_no_times_are_refused(block: list[float]) -> None:
    with pytest.raises(ValueError, match=r"block|times are positive"):
        block_median(block, Rules())


@pytest.mark.parametrize(
    "wrong",
    [
        {"lead_in_calls": 4},
        {"lead_in_calls": -1},
        {"most_calls": 0},
        {"look_growth": 1.0},
        {"error": 0.0},
        {"margin": 1.0},
        {"lead_in_rounds": -1},
        {"most_s": 0.0},
    ],
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"cannot be left out|never|between 0 and 1|no time"):
        Rules(**wrong)  # type: ignore[arg-type]


def test_the_first_round_does_not_count() -> None:
    """Candidates whose first calls say the opposite of all later ones."""
    selector = Selector(["a", "b"], seed=1)
    while (turn := selector.next_turn()) is not None:
        fast = (turn.candidate == "a") == (turn.round == 0)
        selector.record(turn, 1e-3 if fast else 2e-3)
    assert selector.decision is not None
    assert selector.decision.kept == "b"
    assert selector.decision.comparisons[0].ratio.low == pytest.approx(2.0)


@given(st.integers(0, 1000), st.integers(1, 6), st.integers(0, 99))
def test_every_candidate_has_a_block_in_each_round(index: int, block: int, seed: int) -> None:
    made = turns(NAMES, index, block, seed)
    assert [turn.place for turn in made[: 3 * block]] == list(range(block)) * 3
    assert sorted({turn.candidate for turn in made}) == sorted(NAMES)
    assert [(turn.candidate, turn.place) for turn in made[3 * block :]] in ([], [(made[-1].candidate, block)])
    assert made == turns(NAMES, index, block, seed)


def test_the_order_of_a_round_says_nothing_of_the_next_ones() -> None:
    """The interval supposes so. Each of three candidates comes first, and any after it, in a sixth of all rounds."""
    orders = [tuple(turn.candidate for turn in turns(NAMES, index, 1, 0)[:3]) for index in range(3000)]
    for apart in (1, 2, 3, 4):
        both = Counter(zip(orders, orders[apart:], strict=False))
        assert len(both) == 36
        assert max(both.values()) < 2 * min(both.values()) < 2 * len(orders) / 36


@pytest.mark.parametrize("candidates", [NAMES[:2], NAMES], ids=len)
@pytest.mark.parametrize("period", range(2, 17))
def test_rounds_are_not_in_step_with_a_short_period(candidates: tuple[str, ...], period: int) -> None:
    """In some rounds, each candidate has counted calls at every place of the period."""
    rules, call, seen = Rules(), 0, set()
    for index in range(40):
        for turn in turns(candidates, index, rules.block_calls, seed=3):
            if rules.lead_in_calls <= turn.place < rules.block_calls:
                seen.add((turn.candidate, call % period))
            call += 1
    assert len(seen) == len(candidates) * period


@pytest.mark.parametrize("period", [2, 3, 4, 5, 7, 8, 12, 16])
def test_batches_with_a_period_cost_no_more_calls(period: int) -> None:
    """One half of each period takes five times as long."""

    def measured(truth: dict[str, float], seed: int) -> Selector:
        selector, chance, call = Selector(list(truth), seed=seed), random.Random(seed), seed
        while (turn := selector.next_turn()) is not None:
            batch = 5.0 if call % period < period // 2 else 1.0
            selector.record(turn, 1e-3 * batch * truth[turn.candidate] * math.exp(chance.gauss(0, 0.05)))
            call += 1
        return selector

    alike = [measured({"none": 1.0, "copy": 1.0}, seed).decision for seed in range(8)]
    assert sum(one is not None and one.outcome == "same" for one in alike) >= 7
    for seed in range(8):
        for best, outcome in (("none", "same"), ("copy", "faster")):
            found = measured({name: 1.0 if name == best else 1.1 for name in NAMES[:2]}, seed)
            assert found.decision is not None
            assert (found.decision.kept, found.decision.outcome) == (best, outcome)
            assert found.spent.calls <= 250


def test_calls_that_are_nobodys_turn_are_calls_of_the_period() -> None:
    """Windows without measuring, and times that are outstanding."""
    selector, chance, call = Selector(("a", "b"), seed=1), random.Random(1), 0
    while True:
        if selector.at_block_start and chance.random() < 0.1:
            for _ in range(3):
                selector.passed()
                call += 1
        turn = selector.next_turn()
        if turn is None:
            break
        assert turn.call == call
        batch = 5.0 if call % 8 < 4 else 1.0
        selector.record(turn, 1e-3 * batch * (1.1 if turn.candidate == "a" else 1.0) * math.exp(chance.gauss(0, 0.03)))
        call += 1
    assert selector.decision is not None
    assert (selector.decision.kept, selector.spent.calls <= 200) == ("b", True)


@pytest.mark.parametrize(("period", "offset"), [(8, 0), (16, 4), (24, 6)])
def test_batches_whose_period_meets_the_rounds_lead_to_no_wrong_verdict(period: int, offset: int) -> None:
    """One half of each period takes five times as long: blocks of one candidate, or of the other, have all of it."""
    rules, wrong = Rules(most_calls=800), 0
    for seed in range(100):
        selector, chance = Selector(("a", "b"), rules, seed=seed), random.Random(seed)
        for call in itertools.count(offset):
            turn = selector.next_turn()
            if turn is None:
                break
            batch = 5.0 if call % period < period // 2 else 1.0
            selector.record(turn, 1e-3 * batch * math.exp(chance.gauss(0, 0.02)))
        assert selector.decision is not None
        wrong += selector.decision.outcome == "faster"
    assert wrong <= 100 * rules.error


# Intervals


@steady(30)
@given(st.integers(12, 90), st.floats(-1, 1), st.sampled_from([0.05, 0.01]), st.integers(0, 999))
def test_intervals_hold_the_truth_as_often_as_they_say(count: int, truth: float, error: float, seed: int) -> None:
    chance = random.Random(seed)
    trials = 120
    missed = 0
    for _ in range(trials):
        # Symmetric, with heavy tails.
        found = paired_interval([truth + chance.gauss(0, 1) / (0.05 + chance.random()) for _ in range(count)], error)
        assert found.low <= found.estimate <= found.high
        missed += not found.low <= truth <= found.high
    assert missed <= 2 * error * trials + 4 * math.sqrt(2 * error * trials)


def test_an_interval_by_hand() -> None:
    """Wilcoxon's signed ranks for five differences: all on one side have a probability of 1/32."""
    found = paired_interval([1.0, 2.0, 3.0, 4.0, 10.0], 1 / 32)
    assert (found.low, found.high) == (1.0, 10.0)
    assert found.estimate == 3.0
    assert paired_interval([1.0, 2.0, 3.0, 4.0, 10.0], 1 / 33).low == -math.inf
    assert fewest(1 / 32) == 5
    # 2/32: the lowest mean is left out as well, which is the one of 1 and 2.
    assert paired_interval([1.0, 2.0, 3.0, 4.0, 10.0], 2 / 32).low == 1.5


def test_the_approximation_for_many_differences_continues_the_exact_one() -> None:
    chance = random.Random(0)
    values = [chance.gauss(0, 1) for _ in range(61)]
    exact, approximate = paired_interval(values[:60], 0.01), paired_interval(values, 0.01)
    assert approximate.low == pytest.approx(exact.low, abs=0.1)
    assert approximate.high == pytest.approx(exact.high, abs=0.1)


@pytest.mark.parametrize(
    ("values", "error"), [([], 0.01), ([math.nan], 0.01), ([math.inf], 0.1), ([1.0], 0), ([1.0], 1)]
)
def test_intervals_of_nothing_are_refused(values: list[float], error: float) -> None:
    with pytest.raises(ValueError, match="interval"):
        paired_interval(values, error)


def test_a_comparison_reads_as_how_many_times_the_time() -> None:
    found = compare("a", "b", [{"a": 1.0, "b": 2.0}, {"a": 1.0}, {"a": 2.0, "b": 4.0}], 0.3)
    assert found is not None
    assert (found.ratio.estimate, found.rounds) == (pytest.approx(2.0), 2)
    assert compare("a", "b", [{"a": 1.0}], 0.1) is None


# The state machine


def test_a_lost_call_costs_its_round_only() -> None:
    selector = Selector(["a", "b"], seed=2)
    chance = random.Random(0)
    lost = 0
    while (turn := selector.next_turn()) is not None:
        if chance.random() < 0.05:
            selector.lost(turn)
            lost += 1
        else:
            selector.record(turn, 1.0 if turn.candidate == "a" else 1.2)
    assert lost > 1
    assert selector.decision is not None
    assert selector.decision.kept == "a"


def test_calls_that_are_all_lost_end_at_the_cap() -> None:
    selector = Selector(["a", "b"], Rules(most_calls=100))
    calls = 0
    while (turn := selector.next_turn()) is not None:
        selector.lost(turn)
        calls += 1
    assert calls == 100
    assert selector.decision is not None
    assert selector.says_little, "nothing was measured that could speak for the simplest"
    assert (selector.decision.kept, selector.decision.outcome) == ("b", "unresolved")


def test_times_may_come_late_and_in_any_order() -> None:
    selector = Selector(["a", "b", "c"], seed=4)
    chance = random.Random(4)
    waiting = []
    calls = 0
    while (turn := selector.next_turn()) is not None and calls < 2000:
        calls += 1
        waiting.append(turn)
        if len(waiting) > 40:
            chance.shuffle(waiting)
            while len(waiting) > 10:
                one = waiting.pop()
                selector.record(one, {"a": 1.3, "b": 1.0, "c": 1.1}[one.candidate] * chance.gauss(1, 0.01))
    assert selector.decision is not None
    assert selector.decision.kept == "b"


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_times_that_are_none_are_refused(seconds: float) -> None:
    selector = Selector(["a", "b"])
    turn = selector.next_turn()
    assert turn is not None
    with pytest.raises(ValueError, match="positive number of seconds"):
        selector.record(turn, seconds)


def test_one_candidate_needs_no_call() -> None:
    selector = Selector(["only"])
    assert selector.next_turn() is None
    assert selector.decision is not None
    assert selector.decision.kept == "only"


@pytest.mark.parametrize("candidates", [[], ["a", "a"]])
def test_candidates_have_names_of_their_own(candidates: list[str]) -> None:
    with pytest.raises(ValueError, match="different names"):
        judge(candidates, [], Rules())


def test_a_void_verdict_is_measured_again_and_what_was_spent_stays() -> None:
    selector = decided({"a": 1.0, "b": 1.5}, FAIR, seed=1)
    calls = selector.spent.calls
    for number in range(MOST_VOIDS):
        assert not selector.steadfast
        assert selector.void(f"reason {number}")
        assert selector.decision is None
        while (turn := selector.next_turn()) is not None:
            selector.record(turn, 1.5 if turn.candidate == "a" else 1.0)
        assert selector.decision is not None
        assert selector.decision.kept == "b"  # type: ignore[unreachable]
    assert selector.spent.calls > 2 * calls
    assert not selector.void("once more")
    assert selector.decision.kept == "b"
    assert selector.voided == [f"reason {number}" for number in range(MOST_VOIDS)]


def _measure(selector: Selector, chance: random.Random, rounds: int) -> None:
    """Until so many count, or it is decided."""
    while selector.rounds < rounds and (turn := selector.next_turn()) is not None:
        selector.record(turn, (100e-6 if turn.candidate == "a" else 50e-6) * chance.gauss(1, 0.02))


@pytest.mark.parametrize("moment", ["in a round", "at the verdict", "when it is given up"])
def test_an_interrupt_anywhere_in_a_selector_leaves_it_such_that_it_goes_on(moment: str) -> None:
    first = Rules().looks(2)[0]
    for line in itertools.count():
        selector, chance = Selector(["a", "b"], seed=2), random.Random(line)
        _measure(selector, chance, {"in a round": 3, "at the verdict": first - 1}.get(moment, first))
        with interrupted_at(line, "selection/selector.py") as where:
            try:
                if moment == "when it is given up":
                    assert selector.decision is not None
                    selector.void("a reason")
                else:
                    _measure(selector, chance, selector.rounds + 1)
            except KeyboardInterrupt:
                assert where
        _measure(selector, chance, 10**6)
        decision = selector.decision
        assert decision is not None, where
        assert (decision.kept, selector.ended_by) == ("b", "certainty"), where
        if not where:
            break
    assert line > 20
