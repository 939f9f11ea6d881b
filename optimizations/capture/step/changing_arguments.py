"""Says which of its arguments are other numbers in each call, where this keeps a step from being replayed."""

from __future__ import annotations

import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from optimizations.capture.signature import exact, plain_values
from optimizations.capture.step.changing_values import MOST_NAMES, MOST_VALUES
from optimizations.report.steps import Refusal

_ADVICE = (
    "leave it out where the step does not need it, decide by it outside of the step, or pass it as a tensor on the GPU"
)


class ChangingArguments:
    """Numbers and strings among the arguments of calls that no recording fits, since the last replay."""

    def __init__(self) -> None:
        self.refusal: Refusal | None = None
        self._replays = 0
        self._calls = 0
        self._seen: dict[str, set[Hashable]] = {}

    def note(self, given: Mapping[str, Hashable], replays: int) -> Refusal | None:
        """Take in the numbers of such a call; a reason when it is time to say so."""
        if self.refusal is not None:
            return None
        if replays != self._replays or not self._calls:
            self._replays, self._calls, self._seen = replays, 0, {name: set() for name in given}
        self._calls += 1
        for name, values in list(self._seen.items()):
            if name not in given or given[name] in values:
                del self._seen[name]
            else:
                values.add(given[name])
        if self._calls < MOST_VALUES or not self._seen:
            return None
        names = sorted(self._seen)
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        each = "each of which is another value" if len(names) > 1 else "which is another value"
        self.refusal = Refusal(f"is given {', '.join(names[:MOST_NAMES])}{more} in each call, {each}", _ADVICE)
        return self.refusal


def numbers_given(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Hashable]:
    """Numbers and strings among the arguments of a call, by how the step's code would write them."""
    function = step.__func__ if isinstance(step, types.MethodType) else step
    code = getattr(function, "__code__", None)
    named = code.co_varnames[: code.co_argcount] if isinstance(code, types.CodeType) else ()
    named = named[int(isinstance(step, types.MethodType)) :]
    found: dict[str, Any] = {}
    for place, value in enumerate(args):
        found.update(plain_values(value, named[place] if place < len(named) else f"argument {place}"))
    for name, value in kwargs.items():
        found.update(plain_values(value, name))
    return {name: exact(value) for name, value in found.items()}
