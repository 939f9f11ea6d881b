"""Make the refusal for a call whose results differ in something else than tensors. It names the part that differs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from optimizations.capture.signature import PLAIN, Same
from optimizations.report.steps import Refusal

MOST_LETTERS = 60
"""A text that is returned is told in part."""


def other_result(before: Hashable, now: Hashable) -> Refusal:
    """Return the refusal for two calls whose results have these unequal structures, of `signature.flatten`."""
    name, was, found = _first_other(before, now, "result")
    return Refusal(
        f"returns something else than a tensor that differs from call to call: {_told(name, was, found)}",
        "return tensors, in tuples, lists, dicts or dataclasses: Python does not run when a graph is launched",
    )


def _first_other(was: Any, now: Any, name: str) -> tuple[str, Any, Any]:
    """Return the first part in which they differ, as a program would write it, and that part of both."""
    for part, old, new in _parts(was, now, name):
        if old != new:
            return _first_other(old, new, part)
    return name, was, now


def _parts(was: Any, now: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield what two containers hold in the same places. Nothing where they are none, or hold other things."""
    if not (_is_container(was) and _is_container(now)) or was[0] is not now[0] or len(was) != len(now):
        return
    keys, old, new = range(len(now[1])), was[1], now[1]
    if len(now) == 4:  # a mapping
        if was[1] != now[1]:
            return
        keys, old, new = now[1], was[2], now[2]
    elif isinstance(now[1], str):  # registered with PyTorch
        old, new = was[2], now[2]
    if len(old) != len(new):
        return
    for key, one, other in zip(keys, old, new, strict=False):
        if len(now) == 3 and isinstance(now[1], tuple) and _is_field(one, other):
            yield f"{name}.{one[0]}", one[1], other[1]
        else:
            yield f"{name}[{key!r}]", one, other


def _is_container(structure: Any) -> bool:
    return isinstance(structure, tuple) and len(structure) in (3, 4) and isinstance(structure[0], type)


def _is_field(one: Any, other: Any) -> bool:
    """Return whether they are of one field of a dataclass. A structure in a list begins with a class, or "tensor"."""
    return all(isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) for each in (one, other))


def _told(name: str, was: Any, now: Any) -> str:
    if isinstance(now, Same):
        return f"`{name}`, an object of {now.kind.__name__}"
    if all(isinstance(each, tuple) and len(each) == 2 and each[0] in PLAIN for each in (was, now)):
        return f"`{name}`, {_number(*now)} where the call before gave {_number(*was)}"
    return f"`{name}`"


def _number(kind: type, value: object) -> str:
    """Return as text a number or text of `signature.exact`, which keeps some numbers as texts."""
    text = value if isinstance(value, str) and kind is not str else repr(value)
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}..."
