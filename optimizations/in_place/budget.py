"""When the work beyond a recording may be done: a recording costs what stock's costs, all else has to be won back.

Pure: what happened goes in as numbers, the answer is what is being waited for, in words, or None for now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from optimizations.byte_units import format_bytes

SHARE = 0.1
"""The work beyond a recording takes at most this share of the time that the graph has been in use."""

SHARE_OF_ALL = 0.25
"""All graphs together take no more of the time that any of them was in use. One alone, or two in turns, never do: each
keeps to its own share, of times that overlap. Fifty sizes that take turns would take more time than the program."""

FEWEST_REPLAYS = 8
"""A graph that is replayed less often is not worth a look."""

LONGEST_GAP_S = 0.1
"""Of the time between two calls, no more counts as use of the graph: a program may be doing something else."""

MEMORY = "memory"
"""What a reason begins with that is about lack of device memory."""

FREE_SHARE = 0.5
"""Of the memory that is free on the device, the work takes at most this much."""

_spread = True


@contextmanager
def spent_at_once() -> Iterator[None]:
    """Inside the block no work waits until use of its graph has won it back, in any thread.

    For programs of which it is known that they go on for long enough.
    """
    global _spread
    before, _spread = _spread, False
    try:
        yield
    finally:
        _spread = before


@dataclass(slots=True)
class InUse:
    """How long something has been in use.

    Attributes:
        in_use_s: time between calls, no gap counted longer than `LONGEST_GAP_S`.
        spent_s: time taken by the work beyond recordings.
    """

    in_use_s: float = 0.0
    spent_s: float = 0.0
    _last: float | None = None

    def called(self, now: float) -> None:
        """To be told of each call; `now` in seconds of a clock that only moves forward."""
        if self._last is not None:
            self.in_use_s += min(now - self._last, LONGEST_GAP_S)
        self._last = now


@dataclass(slots=True)
class Together(InUse):
    """All graphs whose calls are one program's, as far as they are still to be looked at: see `SHARE_OF_ALL`."""

    @property
    def due(self) -> bool:
        """Whether any work may be done now."""
        return self.spent_s <= SHARE_OF_ALL * self.in_use_s

    @property
    def waiting(self) -> str:
        """What is waited for while it may not, in words."""
        share = f"{self.spent_s:.3f} s in {self.in_use_s:.1f} s of use"
        return f"use: work on all graphs has taken {share}, and may take a quarter"


@dataclass(slots=True)
class Use(InUse):
    """How much a graph has been in use, and what was spent on it.

    Attributes:
        together: what all graphs of the program have spent, this one among them.
        replays: calls so far.
        due_s: use after which the next piece of work may be done; see `plan`.
    """

    together: Together = field(default_factory=Together)
    replays: int = 0
    due_s: float = 0.0

    def called(self, now: float) -> None:
        """See `InUse`."""
        InUse.called(self, now)
        self.together.called(now)
        self.replays += 1

    @property
    def mean_call_s(self) -> float:
        """Mean time from one call to the next; 0 before there were two."""
        return self.in_use_s / (self.replays - 1) if self.replays > 1 else 0.0

    def plan(self, cost_s: float) -> str:
        """Sets when work of this cost may be done; what is waited for until then, in words."""
        self.due_s = (self.spent_s + cost_s) / SHARE
        return f"use: {self.spent_s + cost_s:.3f} s of work may be done after {self.due_s:.1f} s of use"

    @property
    def due(self) -> bool:
        """Whether the work that was planned last may be done now."""
        return self._own_is_over and (not _spread or self.together.due)

    @property
    def waits_for_others(self) -> bool:
        """Whether the work would be done now if less had been spent on all graphs together."""
        return self._own_is_over and not self.due

    @property
    def _own_is_over(self) -> bool:
        """Whether the graph itself has been in use for long enough."""
        return self.replays >= FEWEST_REPLAYS and (not _spread or self.in_use_s >= self.due_s)

    def spend(self, seconds: float) -> None:
        """To be told of work that was done."""
        self.spent_s += seconds
        self.together.spent_s += seconds


def waiting_for_memory(needed_bytes: int, free_bytes: int) -> str | None:
    """What is waited for before work that takes this much device memory for a while; None where it may be done."""
    if needed_bytes > FREE_SHARE * free_bytes:
        free = format_bytes(free_bytes)
        return f"{MEMORY}: {format_bytes(needed_bytes)} are needed, and half of the free {free} may be taken"
    return None


def is_about_memory(reason: str | None) -> bool:
    """Whether something waits, or was given up, because memory is short: more calls alone do not help then."""
    return reason is not None and reason.startswith(MEMORY)
