"""Write the line of a user's program in a stack trace the same way on every machine.

The module also counts reasons against CUDA graphs by reason and line of the user's program.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

from optimizations.report import CompiledGraph, LeftOut
from optimizations.stack_trace import Frame, reason_and_frame
from suite.results.schema import NotCaptured

_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
_LINE = re.compile(r"(?P<path>.+?)(?P<rest>:\d+ in .*)", re.DOTALL)
_ROOT = Path(__file__).resolve().parents[2]


def line_of_frame(frame: Frame) -> str:
    """Return a frame as "path:line in function: code"."""
    return str(replace(frame, path=short_path(frame.path)))


def reason_and_line(message: str) -> tuple[str, str | None]:
    """Return one of Inductor's messages as (reason, the user's source line); see `stack_trace.reason_and_frame`."""
    reason, frame = reason_and_frame(message)
    return reason, None if frame is None else line_of_frame(frame)


def short_line(line: str) -> str:
    """Return a line as `stack_trace.Frame` prints it, its path shortened."""
    place = _LINE.fullmatch(line)
    return line if place is None else short_path(place["path"]) + place["rest"]


def short_path(path: str) -> str:
    """Return `path` independent of the machine: relative to the packages, else to this project, else its name."""
    if _PACKAGES.match(path):
        return _PACKAGES.sub("", path)
    if Path(path).is_relative_to(_ROOT):
        return str(Path(path).relative_to(_ROOT))
    return Path(path).name


class Reasons:
    """Count the reasons against CUDA graphs so far. Paths do not depend on the machine."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str | None]] = Counter()

    def add(self, left_out: LeftOut) -> None:
        line = None if left_out.source_line is None else short_line(left_out.source_line)
        self._counts[left_out.reason, line] += left_out.count

    def add_graph(self, graph: CompiledGraph) -> None:
        """Add the reasons for code outside of CUDA graphs in one compiled graph."""
        for left_out in (*graph.not_captured, *graph.left_out):
            self.add(left_out)

    def records(self) -> list[NotCaptured]:
        """Return the reasons in the order in which they were first given."""
        return [
            NotCaptured(reason=reason, source_line=line, count=count) for (reason, line), count in self._counts.items()
        ]
