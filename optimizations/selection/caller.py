"""Which thread calls the functions of a group, and whether it is another one for good.

Note [Threads]. A recording belongs to its manager and not to a thread. Whoever calls it takes the manager's turn, and
waits for what was enqueued on another stream. So a group may be measured in any thread, but in one at a time: where
threads call in turn, one waits for another, and that is in the times. A program that warms up in one thread and serves
from another has changed for good. This is seen as another stream is: by so many calls in a row.
"""

from __future__ import annotations

import threading
from collections.abc import Set
from typing import Literal

from optimizations.selection.validity import WINDOW

ANOTHER_THREAD = "the program went on to another thread"

MOST_RETURNS = 8
"""Times that a thread's calls in a row end before there are `WINDOW` of them; then threads take turns."""


class Caller:
    """The thread of a group's calls, as far as calls are looked at.

    Attributes:
        seen: all threads that called.
        is_elsewhere: whether the last call was another thread's.
    """

    def __init__(self) -> None:
        self.seen = {threading.get_ident()}  # it is made in a function's first call
        self.is_elsewhere = False
        self._thread: int | None = None
        self._other: int | None = None
        self._calls = self._returns = 0

    def note(self) -> Literal["here", "elsewhere", "moved"]:
        """A call on this thread: on that of the calls before, on another one, or on one that has taken over with it."""
        this = threading.get_ident()
        self.seen.add(this)
        self._thread = self._thread or this
        if self.is_elsewhere and this != self._other:
            self._returns += 1
            self._calls = 0
        self.is_elsewhere, self._other = this != self._thread, this
        if not self.is_elsewhere:
            return "here"
        self._calls += 1
        if self._calls < WINDOW:
            return "elsewhere"
        self._thread, self.is_elsewhere, self._calls, self._returns = this, False, 0, 0
        return "moved"

    def missed(self, threads: Set[int]) -> None:
        """These have called, some of them while nobody looked. Of how they did nothing is known."""
        self._returns += len(threads - self.seen)
        self.seen |= threads

    @property
    def take_turns(self) -> bool:
        """Whether several threads call, and none of them for long."""
        return self._returns > MOST_RETURNS

    def take_over(self, other: Caller) -> None:
        """What was seen of another group, which is one with this now."""
        self.seen |= other.seen
        self._thread = self._thread or other._thread
