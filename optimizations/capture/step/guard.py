"""One comparison in C++ of what a recording was made with, made new where it fails or is slow without reason."""

from __future__ import annotations

import time
from collections.abc import Callable


class Guard:
    """One comparison in C++ of entries, by identity. It may fail where nothing changed.

    A number assigned again is another object; and once a guarded dict was written, C++ looks into all of them. Then the
    comparison is made new, at most once in so many calls, twice as many each time. `make` makes it of what is there.
    """

    def __init__(self, make: Callable[[], Callable[[], bool]]) -> None:
        self._make = make
        self._same = make()
        self._calls = 0
        self._wait = PROBE_EVERY
        self._next = PROBE_EVERY
        self._fastest_ns = 0

    def holds(self) -> bool:
        """Whether all entries hold the very same objects."""
        self._calls += 1
        if self._calls < self._next:
            return self._same()
        began = time.perf_counter_ns()
        same = self._same()
        took_ns = time.perf_counter_ns() - began
        self._next = self._calls + PROBE_EVERY
        self._fastest_ns = min(self._fastest_ns or took_ns, took_ns)
        if same and took_ns > SLOW * self._fastest_ns:
            self.was_wrong()
        return same

    def was_wrong(self) -> None:
        """Take in that nothing had changed when it failed, or took long."""
        if self._calls >= self._wait:
            self._wait = self._calls + 2 * self._wait
            self._same = self._make()


PROBE_EVERY = 64
"""Calls between two measurements of how long the comparison in C++ takes."""
SLOW = 4
"""One that takes this many times the fastest looks into all dicts."""
