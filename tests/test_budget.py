"""The work beyond a recording is done for graphs that win it back, and within free memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizations.recording.budget import (
    FEWEST_REPLAYS,
    FREE_SHARE,
    LONGEST_GAP_S,
    SHARE,
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
