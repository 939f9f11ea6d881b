"""Interrupts before a line of Python, or after a call into C, where Python really lets them happen."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any


class _Interrupt:
    """Raise a KeyboardInterrupt at the number-th call of `moment`, once; `where` lists the place."""

    def __init__(self, number: int) -> None:
        self.where: list[str] = []
        self._left = number

    def moment(self, frame: FrameType, what: str = "") -> None:
        if self.where:
            return
        self._left -= 1
        if self._left < 0:
            self.where.append(f"{frame.f_code.co_filename}:{frame.f_lineno}{what}")
            raise KeyboardInterrupt


@functools.cache
def _lines_without_signals(file: str) -> frozenset[int]:
    """Return the lines that tracing reports although Python handles no signal there: `try:` itself, and `with`.

    Tracing reports `with` once more when its block has ended and was not left yet. An exception there would skip
    `__exit__`, and leave a lock locked for good.
    """
    lines: set[int] = set()
    for one in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(one, ast.Try):
            lines.add(one.lineno)
        elif isinstance(one, ast.With):
            lines.update(range(one.lineno, max(one.body[0].lineno, one.lineno + 1)))
    return frozenset(lines)


@contextmanager
def interrupted_at(line: int, *files: str) -> Iterator[list[str]]:
    """Raise a KeyboardInterrupt before the line-th line of these files that is run; yield where that was."""
    interrupt = _Interrupt(line)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not any(file in frame.f_code.co_filename for file in files):
            return None
        if event == "line" and frame.f_lineno not in _lines_without_signals(frame.f_code.co_filename):
            interrupt.moment(frame)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield interrupt.where
    finally:
        sys.settrace(before)


@contextmanager
def interrupted_after(call: int, *files: str) -> Iterator[list[str]]:
    """A KeyboardInterrupt after the call-th call into C that these files make; yields where that was."""
    interrupt = _Interrupt(call)

    def profile(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_return" and frame.f_code.co_filename.endswith(files):
            interrupt.moment(frame, f", {getattr(function, '__name__', function)}")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield interrupt.where
    finally:
        sys.setprofile(before)
