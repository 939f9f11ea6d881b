"""Work beyond a recording begins and ends after a number of replays, and stays within free memory."""

from __future__ import annotations

from optimizations.in_place.budget import (
    FEWEST_BEFORE_A_RACE,
    FEWEST_REPLAYS,
    FREE_SHARE,
    MOST_REPLAYS,
    Use,
    waiting_for_memory,
)
from optimizations.race import CALLS


def test_in_place_work_is_bounded_by_replays() -> None:
    use, due, over = Use(), [], []
    for replay in range(1, 40):
        use.replays += 1
        due += [replay] * use.due
        over += [replay] * use.is_over
    assert (due[0], over[0]) == (FEWEST_REPLAYS, MOST_REPLAYS)


def test_function_is_settled_after_thirty_calls() -> None:
    warm_up_and_recordings = 3
    assert MOST_REPLAYS + warm_up_and_recordings < 30


def test_race_leaves_replays_for_later_work() -> None:
    use = Use(replays=FEWEST_BEFORE_A_RACE)
    assert use.may_race and not use.due
    after = FEWEST_BEFORE_A_RACE + 2 * (CALLS + 1)
    assert after < MOST_REPLAYS
    use.replays = MOST_REPLAYS + 5  # its times were there late
    use.extend(8)
    assert not use.is_over


def test_at_most_a_share_of_free_memory_is_used() -> None:
    assert waiting_for_memory(int(1000 * FREE_SHARE), 1000) is None
    assert "501 B are needed, and half of the free 1000 B" in str(waiting_for_memory(501, 1000))
