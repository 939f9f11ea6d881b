"""Work beyond a recording begins and ends after a number of replays, and stays within free memory."""

from __future__ import annotations

from optimizations.in_place.budget import (
    FREE_SHARE,
    MOST_REPLAYS,
    waiting_for_memory,
)


def test_a_function_is_settled_after_thirty_calls() -> None:
    warm_up_and_recordings = 3
    assert MOST_REPLAYS + warm_up_and_recordings < 30


def test_at_most_a_share_of_the_free_memory_is_taken() -> None:
    assert waiting_for_memory(int(1000 * FREE_SHARE), 1000) is None
    assert "501 B are needed, and half of the free 1000 B" in str(waiting_for_memory(501, 1000))
