"""Find the line of the step that changes something in Python, or asks for what changes on every call. Its code is
searched once the step is refused for that."""

from __future__ import annotations

import dis
import re
import types
from collections.abc import Callable, Iterable, Iterator

_BINDS = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME"})
_GROWS = frozenset({"append", "extend", "insert", "add", "update", "pop", "popleft", "appendleft", "remove", "clear"})


def line_that_binds(codes: Iterable[types.CodeType], name: str) -> str | None:
    """Return "path:number in function" of the only line that binds an attribute, variable or entry; else None."""
    return _only(line for code in codes for line in _lines(code, lambda line: _is_bound(line, name)))


def line_that_grows(codes: Iterable[types.CodeType], path: str) -> str | None:
    """Return the same for a line that calls a method such as `append` of what stands at the end of `path`."""
    words = re.findall(r"\w+", path)
    if not words:
        return None
    return _only(line for code in codes for line in _lines(code, lambda line: _is_grown(line, words[-1])))


def line_that_names(codes: Iterable[types.CodeType], path: str) -> str | None:
    """Return the first line that names the end of `path`, such as an iterator; None if several functions do."""
    if not (words := _words(path)):
        return None
    found = [lines for code in codes if (lines := list(_lines(code, lambda line: words[-1] in _looked_up(line))))]
    functions = {line.rsplit(" in ", 1)[1] for lines in found for line in lines}
    return found[0][0] if len(functions) == 1 else None


def line_that_calls(codes: Iterable[types.CodeType], path: str, method: str) -> str | None:
    """Return the only line that calls a method of the object whose attribute `path` leads to."""
    words = _words(path)
    if len(words) < 2:
        return None
    return _only(line for code in codes for line in _lines(code, lambda line: {words[-2], method} <= _named(line)))


def _words(path: str) -> list[str]:
    """Return the names in a path such as `trainer.sources[0]`, without places in lists. Other texts have none."""
    name = path.split(" in ")[0]
    return [] if " " in name else [word for word in re.findall(r"\w+", name) if not word.isdigit()]


_Line = list[dis.Instruction]
_Fits = Callable[[_Line], bool]


def _is_bound(line: _Line, name: str) -> bool:
    by_name = any(one.opname in _BINDS and one.argval == name for one in line)
    return by_name or (any(one.opname == "STORE_SUBSCR" for one in line) and any(one.argval == name for one in line))


def _is_grown(line: _Line, name: str) -> bool:
    named = _named(line)
    return name in named and not named.isdisjoint(_GROWS)


def _named(line: _Line) -> set[str]:
    return {one.argval for one in line if isinstance(one.argval, str)}


def _looked_up(line: _Line) -> set[str]:
    """Return names on a line, but those of the function's own variables, which are others."""
    return _named([one for one in line if "FAST" not in one.opname])


def _lines(code: types.CodeType, fits: _Fits) -> Iterator[str]:
    by_number: dict[int, _Line] = {}
    for one in dis.get_instructions(code):
        if one.positions is not None and one.positions.lineno is not None:
            by_number.setdefault(one.positions.lineno, []).append(one)
    yield from (f"{code.co_filename}:{number} in {code.co_name}" for number, line in by_number.items() if fits(line))
    for held in code.co_consts:
        if isinstance(held, types.CodeType):
            yield from _lines(held, fits)


def _only(lines: Iterator[str]) -> str | None:
    found = set(lines)
    return found.pop() if len(found) == 1 else None
