"""The work beyond a recording is done for graphs that win it back, and within free memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizations.in_place.budget import (
    FEWEST_REPLAYS,
    FREE_SHARE,
    LONGEST_GAP_S,
    SHARE,
    SHARE_OF_ALL,
    Together,
    Use,
    spent_at_once,
    waiting_for_memory,
)


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=60), st.floats(1e-4, 1.0))
def test_never_more_than_a_tenth_of_the_time_in_use_is_spent(gaps: list[float], cost_s: float) -> None:
    use, now, in_use = Use(), 0.0, 0.0
    use.plan(cost_s)
    use.called(now)
    for gap in gaps:
        now += gap
        in_use += min(gap, LONGEST_GAP_S)
        use.called(now)
        if use.due:
            use.spent_s += cost_s
            assert use.spent_s <= SHARE * in_use * (1 + 1e-9)
            assert use.replays >= FEWEST_REPLAYS
            use.plan(cost_s)


def test_what_is_waited_for_is_said() -> None:
    use = Use(spent_s=0.05)
    assert use.plan(0.05) == "use: 0.100 s of work may be done after 1.0 s of use"


def test_at_most_a_share_of_the_free_memory_is_taken() -> None:
    assert waiting_for_memory(int(1000 * FREE_SHARE), 1000) is None
    assert "501 B are needed, and half of the free 1000 B" in str(waiting_for_memory(501, 1000))


def test_work_is_done_at_once_where_it_is_known_that_calls_go_on() -> None:
    use = Use(replays=FEWEST_REPLAYS - 1)
    use.plan(1.0)
    with pytest.raises(KeyError), spent_at_once():
        assert not use.due, "a graph that is hardly replayed is not worth a look here either"
        use.called(0.0)
        assert use.due
        raise KeyError
    assert not use.due


@given(st.integers(1, 60), st.floats(1e-4, 0.05), st.integers(100, 2000), st.floats(1e-5, 0.2))
def test_alternating_graphs_spend_at_most_a_quarter_together(
    graphs: int, cost_s: float, calls: int, gap: float
) -> None:
    """Each counts the time between two calls of its own, in which all the others were called."""
    together, now = Together(), 0.0
    uses = [Use(together=together) for _ in range(graphs)]
    for use in uses:
        use.plan(cost_s)
    for number in range(calls):
        use = uses[number % graphs]
        use.called(now)
        if use.due:
            use.spend(cost_s)
            use.plan(cost_s)
            now += cost_s
        assert together.spent_s <= SHARE_OF_ALL * together.in_use_s + cost_s
        assert together.in_use_s <= now + 1e-9
        now += gap
    assert together.spent_s == pytest.approx(sum(use.spent_s for use in uses))


def test_one_graph_and_two_in_turns_keep_to_their_own_share() -> None:
    for graphs in (1, 2):
        together, now = Together(), 0.0
        uses = [Use(together=together) for _ in range(graphs)]
        for use in uses:
            use.plan(0.02)
        for number in range(4000):
            use = uses[number % graphs]
            use.called(now)
            assert not use.waits_for_others
            if use.due:
                use.spend(0.02)
                use.plan(0.02)
            now += 0.005


def test_who_waits_for_the_others_says_so() -> None:
    together = Together()
    use, other = Use(together=together), Use(together=together)
    use.plan(0.001)
    other.spend(5.0)
    for call in range(FEWEST_REPLAYS + 1):
        use.called(0.1 * call)
    assert use.in_use_s >= use.due_s and not use.due and use.waits_for_others
    assert together.waiting == "use: work on all graphs has taken 5.000 s in 0.8 s of use, and may take a quarter"
    with spent_at_once():
        assert use.due and not use.waits_for_others
