"""Record operators that a step ran, and find where two runs of it differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optimizations.report.steps import Refusal, StepChanged


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
