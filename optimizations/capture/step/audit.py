"""Check recordings: from time to time a call runs uncaptured, and its operators are compared with the recording's.

The state that the contract of `graph_step` lists is compared before each replay. Everything else that affects which
operators run, or with which numbers, is detected by audits. The audited call runs eagerly under the observer and does
its work. Its operators are compared one by one, by names, numbers, and the origins of tensors. Operators inside
compiled code are not dispatched: there only a new compilation is detected.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from optimizations.report.steps import Refusal, StepChanged

CheckEvery = int | Literal["auto"] | None

FIRST = (8, 16, 32)
"""Approximate numbers of calls before the first audits of a recording, with `check_every="auto"`."""
MOST_TIME = 0.01
"""Share of a program's time that audits may take later."""
IN_A_ROW = 2
"""Calls that are audited one after the other, with "auto": a value may change back in every other call."""
_random = random.Random(0)  # a separate generator: the program's random numbers are not affected


class Audits:
    """Decide when calls of one recording are audited.

    Attributes:
        every: the option `check_every`.
        began_s: time when the recording was made.
        done: audited calls; `skipped`: audits for which there was not enough memory.
        since: number of replays at the last audit.
    """

    def __init__(self, every: CheckEvery, began_s: float) -> None:
        self.every, self.began_s = every, began_s
        self.done = self.skipped = self.since = self._next = self._left = 0
        self._to_come, self._audit_s = list(FIRST), 0.0
        self._plan_next(began_s, 0)

    def due(self, replays: int) -> bool:
        """Return whether the next call is to be audited."""
        return self.every is not None and replays + self.done + 1 >= self._next

    def took(self, seconds: float, now_s: float, replays: int) -> None:
        """Record the duration of an audit."""
        self.done += 1
        self.since = replays
        self._audit_s = max(self._audit_s, seconds)
        self._left -= 1
        if self._left <= 0:
            self._plan_next(now_s, replays)

    def skip(self, now_s: float, replays: int) -> None:
        """Record that there was not enough memory for an audit."""
        self.skipped += 1
        self._plan_next(now_s, replays)

    def _plan_next(self, now_s: float, replays: int) -> None:
        calls = replays + self.done
        if self.every == "auto":
            self._left = IN_A_ROW
            if self._to_come:
                wanted = float(self._to_come.pop(0))
            else:
                per_call_s = max((now_s - self.began_s) / max(calls, 1), 1e-6)
                wanted = calls + max(2 * FIRST[-1], IN_A_ROW * self._audit_s / (MOST_TIME * per_call_s))
            self._next = max(calls + 2, round(wanted * _random.uniform(0.9, 1.1)))
        elif self.every is not None:
            self._left = 1
            self._next = calls + self.every


@dataclass(frozen=True, slots=True)
class Operation:
    """Record one operator. `arguments`: its numbers by value, its tensors by shape, dtype and origin."""

    name: str
    arguments: tuple[Any, ...]
    line: str | None


def first_difference(before: Sequence[Operation], after: Sequence[Operation]) -> Refusal | None:
    """Return a refusal with the first difference of two runs on batches of one signature; None if there is none."""
    if (found := difference(before, after, "the call before")) is None:
        return None
    return Refusal(
        f"differs in two calls with equal shapes: one {found[0]}",
        "a graph repeats one call exactly: take decisions that vary before the step and pass them as tensors, or as "
        "arguments of which each value gets a graph of its own",
        found[1],
    )


def difference(before: Sequence[Operation], after: Sequence[Operation], other: str) -> tuple[str, str | None] | None:
    """Return the first difference from the run that is called `other`, and its line; None if there is none."""
    for old, new in zip(before, after, strict=False):
        if old.name != new.name:
            return f"ran {short(new.name)} where {other} has {short(old.name)}", new.line or old.line
        if old.arguments != new.arguments:
            pairs = list(zip(old.arguments, new.arguments, strict=False))
            was, now = next((pair for pair in pairs if pair[0] != pair[1]), (len(old.arguments), len(new.arguments)))
            return f"ran {short(new.name)}(..., {_text(now)}) where {other} has {_text(was)}", new.line or old.line
    if len(before) != len(after):
        longer = max(before, after, key=len)[min(len(before), len(after))]
        return (
            f"{'ran' if len(after) > len(before) else 'did not run'} {short(longer.name)}, other than {other}",
            longer.line,
        )
    return None


def changed(step: str, found: tuple[str, str | None], first: int, last: int) -> StepChanged:
    """Return the error of an audited call that did what was `found`, after the replays `first` to `last`."""
    what, line = found
    which = f"Replays {first} to {last}" if last > first else f"Replay {first}"
    used = f" {which} did what was recorded." if last >= first else ""
    place = f" ({line})" if line else ""
    return StepChanged(
        f"{step}() {what}{place}.{used} Pass what decides it as an argument or a tensor, or name it: "
        "graph_step(step, key=lambda: ...)"
    )


def _text(argument: Any) -> str:
    """Return a number as text; for a tensor its dtype, shape and name."""
    if isinstance(argument, tuple) and len(argument) >= 3:
        return " ".join(str(part) for part in argument if part != "")
    return str(argument)


def short(name: str) -> str:
    """Return `aten.add_.Tensor` as a user would write it: `add_`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else name
