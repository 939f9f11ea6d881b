"""Check recordings: from time to time a call runs uncaptured, and its operators are compared with the recording's.

What a recording depends on is compared before each replay as far as the contract of `graph_step` lists it. Everything
else that decides which operators run, or with which numbers, shows here: the audited call runs as it is under the
observer, does its work, and is compared operator by operator, by names, numbers, and the origins of tensors. Operators
inside of compiled code are not dispatched: of these only a new compilation is noticed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from optimizations.capture.step.operations import Operation, short
from optimizations.report.steps import StepChanged

CheckEvery = int | Literal["auto"] | None

FIRST = (8, 16, 32)
"""About so many calls of a recording before its first audits, with `check_every="auto"`."""
MOST_TIME = 0.01
"""Share of a program's time that audits may take later."""
IN_A_ROW = 2
"""Calls that are audited one after the other, with "auto": a value may change back in every other call."""
_random = random.Random(0)  # the program's random numbers stay as they are


@dataclass(slots=True)
class Audits:
    """Decide when calls of one recording are audited.

    Attributes:
        every: the option `check_every`.
        served: calls that the recording served, audited ones included.
        done: audited calls; `skipped`: those for which there was no memory.
        since: replays up to the last audit.
    """

    every: CheckEvery
    served: int = 0
    done: int = 0
    skipped: int = 0
    since: int = 0
    _next: int = 0
    _left: int = 0
    _to_come: list[int] = field(default_factory=lambda: list(FIRST))
    _audit_s: float = 0.0
    _began_s: float = 0.0

    def start(self, now_s: float) -> None:
        """Begin to count, when the recording is made."""
        self._began_s = now_s
        self._plan_next(now_s)

    def due(self) -> bool:
        """Return whether the next call is to be audited."""
        return self.every is not None and self.served + 1 >= self._next

    def took(self, seconds: float, now_s: float, replays: int) -> None:
        """Take in an audit of so many seconds."""
        self.done += 1
        self.served += 1
        self.since = replays
        self._audit_s = max(self._audit_s, seconds)
        self._left -= 1
        if self._left <= 0:
            self._plan_next(now_s)

    def skip(self, now_s: float) -> None:
        """Take in that there was no memory for an audit."""
        self.skipped += 1
        self._plan_next(now_s)

    def _plan_next(self, now_s: float) -> None:
        if self.every == "auto":
            self._left = IN_A_ROW
            if self._to_come:
                wanted = float(self._to_come.pop(0))
            else:
                per_call_s = max((now_s - self._began_s) / max(self.served, 1), 1e-6)
                wanted = self.served + max(2 * FIRST[-1], IN_A_ROW * self._audit_s / (MOST_TIME * per_call_s))
            self._next = max(self.served + 2, round(wanted * _random.uniform(0.9, 1.1)))
        elif self.every is not None:
            self._left = 1
            self._next = self.served + self.every


def require_same(
    step: str, recorded: Sequence[Operation], now: Sequence[Operation], *, replays: tuple[int, int], why: str | None
) -> None:
    """Compare the operators of an audited call with those of its recording.

    Args:
        replays: the first and the last replay that may have been wrong.
        why: what else the audited call did that no recording holds, such as a read of a value on the host.

    Raises:
        StepChanged: they differ.
    """
    found = (why, None) if why is not None else _difference(recorded, now)
    if found is None:
        return
    what, line = found
    first, last = replays
    which = f"Replays {first} to {last}" if last > first else f"Replay {first}"
    used = f" {which} did what was recorded." if last >= first else ""
    place = f" ({line})" if line else ""
    raise StepChanged(
        f"{step}() {what}{place}.{used} Pass what decides it as an argument or a tensor, or name it: "
        "graph_step(step, key=lambda: ...)"
    )


def _difference(recorded: Sequence[Operation], now: Sequence[Operation]) -> tuple[str, str | None] | None:
    for old, new in zip(recorded, now, strict=False):
        if old.name != new.name:
            return f"ran {short(new.name)} where its recorded graph has {short(old.name)}", new.line or old.line
        if old.arguments != new.arguments:
            pairs = list(zip(old.arguments, new.arguments, strict=False))
            was, is_now = next((pair for pair in pairs if pair[0] != pair[1]), (len(old.arguments), len(new.arguments)))
            return f"ran {short(new.name)}(..., {_text(is_now)}) where its recorded graph has {_text(was)}", new.line
    if len(recorded) != len(now):
        longer = max(recorded, now, key=len)[min(len(recorded), len(now))]
        did = "ran" if len(now) > len(recorded) else "did not run"
        return f"{did} {short(longer.name)}, other than its recorded graph", longer.line
    return None


def _text(argument: Any) -> str:
    """Return a number as it is; of a tensor, its dtype, shape and name."""
    if isinstance(argument, tuple) and len(argument) >= 3:
        return " ".join(str(part) for part in argument if part != "")
    return str(argument)
