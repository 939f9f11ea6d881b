"""Decide when the work beyond a recording is done, by counts of replays: no clock decides when it begins and ends.

1. Nothing is done in the first `FEWEST_REPLAYS` replays of a recording. In these it is counted which inputs move.
2. Then the graph is read, and where that does not tell enough, captured once more. Captures take at most as long as the
   recording took (`MOST_WORK`).
3. What has to be tried out is tried out in the calls that follow.
4. After `MOST_REPLAYS` replays nothing new is begun: what is not known by then stays as stock has it. So a
   function is settled after 30 calls, with its warm-up, its recording, and a recording in a second pool. Outcomes of
   trials that are under way still count, and nothing waits for them.
5. A recording that others of its function leave out for long (`most_calls_between`) stays as stock made it.

Pure: what happened goes in as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from optimizations.byte_units import format_bytes
from optimizations.report.recordings import MEMORY

FEWEST_REPLAYS = 8
"""A graph that is replayed less often is not worth a look."""

FEWEST_BEFORE_A_RACE = 2
"""Replays before a race of the graph's chain against branches, which takes 18 calls, and comes before all else."""

MOST_REPLAYS = 24
"""Replays of a recording after which nothing new is begun."""

MOST_WORK = 1.0
"""What captures beyond the recording take at most, in times of the recording, the first one aside."""

MOST_CALLS_BETWEEN = 30
"""Calls of a function between two replays of a recording, after which that one is replayed too seldom."""

FREE_SHARE = 0.5
"""Of the memory that is free on the device, the work takes at most this much."""


@dataclass(slots=True)
class Use:
    """Count how often a recording was replayed, and say what may be done with it.

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
        """Return whether the graph may be worked on."""
        return self.replays >= FEWEST_REPLAYS

    @property
    def is_over(self) -> bool:
        """Return whether nothing new is begun any more."""
        return self.replays >= self.last

    def extend(self, replays: int) -> None:
        """Allow work in this many more replays at least."""
        self.last = max(self.last, self.replays + replays)


def most_calls_between(recordings: int) -> int:
    """Return after how many calls of a function with so many recordings one of them is replayed too seldom."""
    return max(MOST_CALLS_BETWEEN, 2 * recordings)


def waiting_for_memory(needed_bytes: int, free_bytes: int) -> str | None:
    """Return what is waited for before work that takes this much device memory; None where it may be done."""
    if needed_bytes > FREE_SHARE * free_bytes:
        free = format_bytes(free_bytes)
        return f"{MEMORY}: {format_bytes(needed_bytes)} are needed, and half of the free {free} may be taken"
    return None


def is_about_memory(reason: str | None) -> bool:
    """Return whether something waits, or was given up, because memory is short: more calls alone do not help then."""
    return reason is not None and reason.startswith(MEMORY)
