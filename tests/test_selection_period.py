"""Which calls of a period are dear is learned where it is plain, and only what all candidates have in common."""

from __future__ import annotations

import math
import random

import pytest

from optimizations.selection.period import FEWEST, LONGEST, NO_PERIOD, Period, Timed, period_of


def times(cost: dict[str, list[float]], calls: int = 120, noise: float = 0.02, seed: int = 0) -> list[Timed]:
    """Calls that candidates serve in blocks of three; what each call of a period costs them."""
    chance, names, made = random.Random(seed), list(cost), []
    for block in range(calls // 3):
        name = chance.choice(names)
        for call in range(3 * block, 3 * block + 3):
            seconds = cost[name][call % len(cost[name])] * math.exp(chance.gauss(0, noise))
            made.append(Timed(call, name, seconds))
    return made


@pytest.mark.parametrize("length", [2, 3, 5, 8, 13])
def test_a_period_is_found_whoever_served_which_call(length: int) -> None:
    dear = [5.0] * (length // 2) + [1.0] * (length - length // 2)
    found = period_of(times({"a": dear, "b": [1.2 * one for one in dear]}))
    assert len(found.ratios) == length
    assert max(found.ratios) / min(found.ratios) == pytest.approx(5.0, rel=0.05)
    assert math.fsum(map(math.log, found.ratios)) == pytest.approx(0.0, abs=1e-9)
    assert math.fsum(found.offsets) == pytest.approx(0.0, abs=1e-9)
    assert found.ratio(length) == found.ratios[0]
    assert found.offset_s(length + 1) == found.offsets[1]


@pytest.mark.parametrize("seed", range(20))
def test_noise_has_no_period(seed: int) -> None:
    assert period_of(times({"a": [1.0], "b": [1.1]}, noise=0.3, seed=seed)) is NO_PERIOD
    made = times({"a": [1.0], "b": [1.1]}, seed=seed)
    chance = random.Random(seed)
    late = [Timed(one.call, one.candidate, one.seconds * (50 if chance.random() < 0.05 else 1)) for one in made]
    assert period_of(late) is NO_PERIOD


def test_what_one_candidate_has_alone_is_its_own() -> None:
    found = period_of(times({"a": [9.0, 9.0, 1.0, 1.0], "b": [1.0]}))
    assert max(found.ratios) / min(found.ratios) < 1.1
    both = period_of(times({"a": [8.0, 1.0], "b": [2.0, 1.0]}))
    assert max(both.ratios) / min(both.ratios) == pytest.approx(2.0, rel=0.4), "the lesser effect"


def test_a_hundred_times_as_long_is_no_more_than_is_said() -> None:
    found = period_of(times({"a": [1.0, 1.0, 1.0, 1.0, 100.0], "b": [1.0, 1.0, 1.0, 1.0, 100.0]}))
    assert found == NO_PERIOD or len(found.ratios) == 5


def test_too_few_times_say_nothing() -> None:
    assert period_of([]) is NO_PERIOD
    assert period_of(times({"a": [5.0, 1.0], "b": [5.0, 1.0]}, calls=2 * FEWEST - 2)) is NO_PERIOD
    assert period_of([Timed(call, "a", 1.0) for call in range(60)]) is NO_PERIOD
    assert LONGEST >= 16
    assert Period((1.0,), (0.0,)) == NO_PERIOD
