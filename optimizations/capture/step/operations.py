"""Record operators that a step ran, and find where two runs of it differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optimizations.report.steps import Refusal


@dataclass(frozen=True, slots=True)
class Operation:
    """Record one operator. `arguments`: its numbers as they are, its tensors by shape, dtype and origin."""

    name: str
    arguments: tuple[Any, ...]
    line: str | None


def first_difference(before: Sequence[Operation], after: Sequence[Operation]) -> Refusal | None:
    """Return why two runs of a step on batches of one signature cannot be the same graph; None if they are the same."""
    for old, new in zip(before, after, strict=False):
        if old.name != new.name:
            return _differs(f"ran {short(new.name)} where the call before ran {short(old.name)}", new.line or old.line)
        if old.arguments != new.arguments:
            pairs = zip(old.arguments, new.arguments, strict=False)
            was, now = next(((a, b) for a, b in pairs if a != b), (len(old.arguments), len(new.arguments)))
            return _differs(f"gave {short(new.name)} {now!r} where the call before gave {was!r}", new.line or old.line)
    if len(before) != len(after):
        longer = max(before, after, key=len)[min(len(before), len(after))]
        what = "ran" if len(after) > len(before) else "did not run"
        return _differs(f"{what} {short(longer.name)}, other than the call before", longer.line)
    return None


def _differs(what: str, line: str | None) -> Refusal:
    return Refusal(
        f"differs in two calls with equal shapes: one {what}",
        "a graph repeats one call exactly: take decisions that vary before the step and pass them as tensors, or as "
        "arguments of which each value gets a graph of its own",
        line,
    )


def short(name: str) -> str:
    """Return `aten.add_.Tensor` as a user would write it: `add_`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else name
