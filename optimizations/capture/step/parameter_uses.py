"""What a function does with its parameters: never mentions them, or only hands them on to calls that are known.

Note [Parameters that are handed on]. Python's instructions are followed from one to the next, with what they put on the
stack. Where another path comes in, or an instruction is not known here, nothing of the stack is known any more. Each
time a parameter is loaded has to end as an argument of a call whose function is found by names; all else counts as
reading it. Which function is called shows only when it is: `followed_calls` looks. For Python 3.11 to 3.14.
"""

from __future__ import annotations

import dis
import inspect
import re
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from optimizations.capture.step.name_uses import FIRST, FREE, GLOBAL, Owner, instructions
from optimizations.capture.step.program_code import names

_READ_OWN = frozenset({"locals", "vars", "eval", "exec", "compile", "dir", "breakpoint"})
_READ_FRAMES = frozenset(
    {"set_trace", "_getframe", "currentframe", "stack", "getargvalues", "settrace", "setprofile", "f_locals", "f_back"}
    | {"tb_frame", "gi_frame", "cr_frame", "ag_frame", "_current_frames", "walk_stack", "getouterframes", "query"}
    | {"getinnerframes", "builtins", "__builtins__"}
)
"""By these, code may read its own variables without naming them: functions of Python, and attributes and others."""
_WORD = re.compile(r"\w+")
_NO_EFFECT = frozenset(
    {"NOP", "RESUME", "PRECALL", "CACHE", "EXTENDED_ARG", "COPY_FREE_VARS", "MAKE_CELL", "NOT_TAKEN"}
)
_GIVES_ONE = frozenset(
    {"BINARY_OP", "BINARY_SUBSCR", "UNARY_NEGATIVE", "UNARY_NOT", "UNARY_INVERT", "BUILD_TUPLE", "BUILD_LIST"}
    | {"BUILD_MAP", "BUILD_CONST_KEY_MAP", "BUILD_SLICE", "BINARY_SLICE", "COMPARE_OP", "IS_OP", "CONTAINS_OP"}
)
"""They put one thing on the stack, and take as many as their effect on it says."""
_CONSTANTS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT", "LOAD_CONST_IMMORTAL", "LOAD_CONST_MORTAL"})
_NULL = object()
"""What stands next to a function where a method would have its object, or the object of a method."""


@dataclass(frozen=True, slots=True)
class Handed:
    """An argument of a call. `place`: counted from 0 without the object of a method; `keyword`: its name; `at`: where
    the call stands in the function's instructions, in bytes."""

    to: Owner
    place: int | None = None
    keyword: str | None = None
    at: range = range(0)


@dataclass(frozen=True)
class ParameterUses:
    """Of a function.

    Attributes:
        unread: parameters that it never mentions, those of `*` and `**` included.
        handed: what calls others are given to, that it uses for nothing else.
    """

    unread: frozenset[str]
    handed: dict[str, tuple[Handed, ...]]


def parameter_uses(code: types.CodeType) -> ParameterUses:
    """What becomes of a function's parameters. Note [Parameters that are handed on]."""
    looked_up = {step.argval for step in instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    if not _READ_FRAMES.isdisjoint(names(code)) or not _READ_OWN.isdisjoint(looked_up):
        return ParameterUses(frozenset(), {})
    mentions = Counter(_mentioned(code))
    unread = frozenset(name for name in code.co_varnames[: _count(code)] if name not in mentions)
    handed: dict[str, list[Handed]] = {}
    for name, call in _handed(code):
        handed.setdefault(name, []).append(call)
    known = {name: tuple(calls) for name, calls in handed.items() if mentions[name] == len(calls)}
    return ParameterUses(unread, known)


def parameter_at(code: types.CodeType, place: int) -> str | None:
    """The parameter that takes a positional argument; None where there is none."""
    if place < code.co_argcount:
        return code.co_varnames[place]
    return code.co_varnames[_named(code)] if code.co_flags & inspect.CO_VARARGS else None


def parameter_named(code: types.CodeType, keyword: str) -> str | None:
    """The parameter that takes a named argument; None where there is none."""
    if keyword in code.co_varnames[code.co_posonlyargcount : _named(code)]:
        return keyword
    return code.co_varnames[_count(code) - 1] if code.co_flags & inspect.CO_VARKEYWORDS else None


def _named(code: types.CodeType) -> int:
    return code.co_argcount + code.co_kwonlyargcount


def _count(code: types.CodeType) -> int:
    return _named(code) + bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)


def _mentioned(code: types.CodeType) -> Iterator[str]:
    """All names in the instructions of code, whatever they are for, and all words of its texts. Names that arguments of
    calls are given by are none of its own."""
    steps = instructions(code)
    for step, behind in zip(steps, [*steps[1:], None], strict=True):
        if step.opname == "KW_NAMES" or (behind is not None and behind.opname == "CALL_KW"):
            continue
        yield from _words_in(step.argval)


def _words_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from _WORD.findall(value)
    elif isinstance(value, bytes):
        yield from _WORD.findall(value.decode("latin-1"))
    elif isinstance(value, types.CodeType):
        yield from _mentioned(value)
    elif isinstance(value, (tuple, frozenset)):
        for one in value:
            yield from _words_in(one)


def _handed(code: types.CodeType) -> Iterator[tuple[str, Handed]]:
    """Parameters that are arguments of calls."""
    steps = instructions(code)
    first = code.co_varnames[0] if code.co_argcount else None
    if any(step.opname.startswith(("STORE_FAST", "DELETE_FAST")) and first in _names_in(step) for step in steps):
        first = None
    stack: list[Any] = []  # an `Owner`; the name of a parameter; `_NULL`; a constant in a list; None
    keywords: tuple[str, ...] = ()
    for index, step in enumerate(steps):
        name = step.opname
        if step.is_jump_target:
            stack.clear()
        if name in _NO_EFFECT:
            continue
        if name == "KW_NAMES":
            keywords = step.argval if isinstance(step.argval, tuple) else code.co_consts[step.arg or 0]
        elif name.startswith("LOAD_FAST") and name != "LOAD_FAST_AND_CLEAR":
            stack += [(FIRST, variable) if variable == first else variable for variable in _names_in(step)]
        elif name == "LOAD_DEREF":
            free = step.argval in code.co_freevars
            stack.append(((FREE if free else FIRST), step.argval) if free or step.argval == first else None)
        elif name == "LOAD_GLOBAL":
            behind, before = step.argrepr.endswith("+ NULL"), step.argrepr.startswith("NULL +")
            stack += [_NULL] * before + [(GLOBAL, step.argval)] + [_NULL] * behind
        elif name == "PUSH_NULL":
            stack.append(_NULL)
        elif name in _CONSTANTS:
            stack.append([step.argval])
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            owner = _taken(stack, 1)[0]
            stack.append((*owner, step.argval) if isinstance(owner, tuple) else None)
            stack += [_NULL] * (name == "LOAD_METHOD" or "NULL|self" in step.argrepr)
        elif name in ("CALL", "CALL_KW"):
            if name == "CALL_KW":
                given = _taken(stack, 1)[0]
                keywords = given[0] if isinstance(given, list) else ()
            arguments = _taken(stack, step.arg or 0)
            yield from _of_call(_taken(stack, 2), arguments, keywords, _where(steps, index))
            keywords = ()
            stack.append(None)
        elif name in _GIVES_ONE:
            _taken(stack, 1 - dis.stack_effect(step.opcode, step.arg, jump=False))
            stack.append(None)
        else:
            stack.clear()


def _names_in(step: dis.Instruction) -> tuple[Any, ...]:
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _taken(stack: list[Any], count: int) -> list[Any]:
    """The topmost of the stack, which are taken from it; None for what is not known to be there."""
    taken = stack[len(stack) - count :] if count <= len(stack) else [None] * (count - len(stack)) + stack
    del stack[max(len(stack) - count, 0) :]
    return taken if count else []


def _where(steps: Sequence[dis.Instruction], index: int) -> range:
    """Where a frame says that it is while this call lasts: up to the instruction behind. What prepares it counts."""
    first = index - 1 if index and steps[index - 1].opname == "PRECALL" else index
    return range(steps[first].offset, steps[index + 1].offset if index + 1 < len(steps) else steps[index].offset + 64)


def _of_call(
    callee: list[Any], arguments: list[Any], keywords: tuple[str, ...], at: range
) -> Iterator[tuple[str, Handed]]:
    """What is handed on by a call. `callee`: the function and what stands next to it, in either order."""
    functions = [one for one in callee if one is not _NULL]
    if len(functions) != 1 or not isinstance(functions[0], tuple):
        return
    by_place = len(arguments) - len(keywords)
    for index, argument in enumerate(arguments):
        if isinstance(argument, str):
            place, keyword = (index, None) if index < by_place else (None, keywords[index - by_place])
            yield argument, Handed(functions[0], place, keyword, at)
