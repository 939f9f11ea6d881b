"""Decide when the work after a recording is done, by counts of replays and never by a clock.

1. In the first `FEWEST_REPLAYS` replays of a recording, only moved inputs are counted.
2. Then the graph is read and, if that is not sufficient, captured once more. Captures take at most as long as the
   recording took (`MOST_WORK`).
3. After `MOST_REPLAYS` replays nothing new is begun: inputs that are undecided by then are copied as in stock. So a
   function is settled after 30 calls, including its warm-up, its recording, and a recording in a second pool.
4. A recording that is replayed too seldom compared with others of its function (`most_calls_between`) stays as stock
   made it.

These are pure functions of counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from optimizations.byte_units import format_bytes
from optimizations.report.recordings import MEMORY

FEWEST_REPLAYS = 8
"""A graph that is replayed less often is not examined."""

FEWEST_BEFORE_A_RACE = 2
"""Replays before the race of the graph's chain against branches. The race takes 18 calls and precedes other work."""

MOST_REPLAYS = 24
"""Replays of a recording after which nothing new is begun."""

MOST_WORK = 1.0
"""Most time for captures after the first extra one, as a multiple of the recording's time."""

MOST_CALLS_BETWEEN = 30
"""Calls of a function between two replays of a recording, after which that one is replayed too seldom."""

FREE_SHARE = 0.5
"""The work allocates at most this share of the free device memory."""


@dataclass(slots=True)
class Use:
    """Count how often a recording was replayed, and decide which work is allowed.

    Attributes:
        replays: how often it was launched.
        last: replays after which nothing new is begun.
    """

    replays: int = 0
    last: int = MOST_REPLAYS

    @property
    def may_race(self) -> bool:
        """Return whether the chain may be raced against branches."""
        return self.replays >= FEWEST_BEFORE_A_RACE

    @property
    def due(self) -> bool:
        """Return whether the graph may be examined."""
        return self.replays >= FEWEST_REPLAYS

    @property
    def is_over(self) -> bool:
        """Return whether nothing new is begun any more."""
        return self.replays >= self.last

    def extend(self, replays: int) -> None:
        """Allow work in this many more replays at least."""
        self.last = max(self.last, self.replays + replays)


def most_calls_between(recordings: int) -> int:
    """Return the most calls between two replays of one of a function's `recordings`, before it counts as seldom."""
    return max(MOST_CALLS_BETWEEN, 2 * recordings)


def waiting_for_memory(needed_bytes: int, free_bytes: int) -> str | None:
    """Return why work that takes this much device memory must wait; None if it may be done now."""
    if needed_bytes > FREE_SHARE * free_bytes:
        free = format_bytes(free_bytes)
        return f"{MEMORY}: {format_bytes(needed_bytes)} are needed, and half of the free {free} may be taken"
    return None


def is_about_memory(reason: str | None) -> bool:
    """Return whether the reason for waiting or giving up is short memory, which more calls do not change."""
    return reason is not None and reason.startswith(MEMORY)
