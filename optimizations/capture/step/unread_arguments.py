"""Arguments that a step's code never reads: a number there may differ from call to call.

Training loops pass the number of a batch to every step, and most steps have no use for it.
"""

from __future__ import annotations

import dis
import re
import types
from collections.abc import Iterator
from typing import Any

from optimizations.capture.step.program_code import names

_READ_FRAMES = frozenset(
    {"locals", "vars", "eval", "exec", "compile", "dir", "breakpoint", "set_trace"}
    | {"_getframe", "currentframe", "stack", "getargvalues", "settrace", "setprofile"}
)
"""By these, code may read its own variables without naming them."""
_NUMBERS = (bool, int, float, str)
_WORD = re.compile(r"\w+")


class UnreadArguments:
    """Of a function or method, parameters that its code does not mention."""

    def __init__(self, function: types.FunctionType, skipped: int) -> None:
        self._function = function
        self._code = code = function.__code__
        count = code.co_argcount + code.co_kwonlyargcount
        read = set(_mentioned(code))
        reads_all = not _READ_FRAMES.isdisjoint(names(code))
        self.names = frozenset(name for name in code.co_varnames[skipped:count] if not reads_all and name not in read)
        positional = code.co_varnames[skipped : code.co_argcount]
        # One that is passed by its place only leaves its name to `**` arguments.
        self._by_name = self.names.intersection(code.co_varnames[code.co_posonlyargcount : count])
        self._places = tuple(place for place, name in enumerate(positional) if name in self.names)

    def left_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with None for numbers and strings that are not read."""
        if self._function.__code__ is not self._code:
            return args, kwargs
        if any(place < len(args) and type(args[place]) in _NUMBERS for place in self._places):
            given = list(args)
            for place in self._places:
                if place < len(given) and type(given[place]) in _NUMBERS:
                    given[place] = None
            args = tuple(given)
        if not self._by_name.isdisjoint(kwargs):
            kwargs = {
                name: None if name in self._by_name and type(value) in _NUMBERS else value
                for name, value in kwargs.items()
            }
        return args, kwargs


def unread_arguments(step: Any) -> UnreadArguments | None:
    """Those of a function or method of Python; None if there are none, or it is something else."""
    method = isinstance(step, types.MethodType)
    function = step.__func__ if method else step
    if not isinstance(function, types.FunctionType):
        return None
    found = UnreadArguments(function, skipped=int(method))
    return found if found.names else None


def _mentioned(code: types.CodeType) -> Iterator[str]:
    """All names in the instructions of code, whatever they are for, and all words of its texts."""
    for instruction in dis.get_instructions(code):
        for value in instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,):
            if isinstance(value, str):
                yield from _WORD.findall(value)
            elif isinstance(value, types.CodeType):
                yield from _mentioned(value)
