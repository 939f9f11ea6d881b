"""Check recordings: from time to time a call runs uncaptured, and its operators are compared with the recording's.

The state that the contract of `graph_step` lists is compared before each replay. Everything else that affects which
operators run, or with which numbers, is detected by audits. The audited call runs eagerly under the observer and does
its work. Its operators are compared one by one, by names, numbers, and the origins of tensors. Operators inside
compiled code are not dispatched: there only a new compilation is detected.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

CheckEvery = int | Literal["auto"] | None

FIRST = (8, 16, 32)
"""Approximate numbers of calls before the first audits of a recording, with `check_every="auto"`."""
MOST_TIME = 0.01
"""Share of a program's time that audits may take later."""
IN_A_ROW = 2
"""Calls that are audited one after the other, with "auto": a value may change back in every other call."""
_random = random.Random(0)  # a separate generator: the program's random numbers are not affected


@dataclass(slots=True)
class Audits:
    """Decide when calls of one recording are audited.

    Attributes:
        every: the option `check_every`.
        calls: replayed and audited calls of the recording.
        done: audited calls; `skipped`: audits for which there was not enough memory.
        since: number of replays at the last audit.
    """

    every: CheckEvery
    calls: int = 0
    done: int = 0
    skipped: int = 0
    since: int = 0
    _next: int = 0
    _left: int = 0
    _to_come: list[int] = field(default_factory=lambda: list(FIRST))
    _audit_s: float = 0.0
    _began_s: float = 0.0

    def start(self, now_s: float) -> None:
        """Start counting when the recording is made."""
        self._began_s = now_s
        self._plan_next(now_s)

    def due(self) -> bool:
        """Return whether the next call is to be audited."""
        return self.every is not None and self.calls + 1 >= self._next

    def took(self, seconds: float, now_s: float, replays: int) -> None:
        """Record the duration of an audit."""
        self.done += 1
        self.calls += 1
        self.since = replays
        self._audit_s = max(self._audit_s, seconds)
        self._left -= 1
        if self._left <= 0:
            self._plan_next(now_s)

    def skip(self, now_s: float) -> None:
        """Record that there was not enough memory for an audit."""
        self.skipped += 1
        self._plan_next(now_s)

    def _plan_next(self, now_s: float) -> None:
        if self.every == "auto":
            self._left = IN_A_ROW
            if self._to_come:
                wanted = float(self._to_come.pop(0))
            else:
                per_call_s = max((now_s - self._began_s) / max(self.calls, 1), 1e-6)
                wanted = self.calls + max(2 * FIRST[-1], IN_A_ROW * self._audit_s / (MOST_TIME * per_call_s))
            self._next = max(self.calls + 2, round(wanted * _random.uniform(0.9, 1.1)))
        elif self.every is not None:
            self._left = 1
            self._next = self.calls + self.every
