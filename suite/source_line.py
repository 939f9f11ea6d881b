"""The line of a user's program in a stack trace, written the same way on every machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(
    r'File "(?P<path>[^"]+)", line (?P<number>\d+), in (?P<function>[^\n]+)(?:\n(?!\s*File ")(?P<code>[^\n]+))?'
)
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack trace. `code` is "" where the trace does not quote it."""

    path: str
    number: int
    function: str
    code: str

    def __str__(self) -> str:
        place = f"{short_path(self.path)}:{self.number} in {self.function}"
        return f"{place}: {self.code}" if self.code else place


def frames(stack_trace: str) -> list[Frame]:
    """Frames of a trace as Python prints it, outermost first. Text that is no frame is passed over."""
    return [
        Frame(match["path"], int(match["number"]), match["function"].strip(), (match["code"] or "").strip())
        for match in _FRAME.finditer(stack_trace)
    ]


def user_line(stack_trace: str | None) -> str | None:
    """The innermost line of `stack_trace` outside PyTorch, as "path:line in function: code"; None without a frame.

    A call of a PyTorch module from the user's code counts as the user's line, not the line inside the module.
    """
    found = frames(stack_trace or "")
    outside = [frame for frame in found if not short_path(frame.path).startswith("torch/")]
    return str((outside or found)[-1]) if found else None


def short_path(path: str) -> str:
    """`path` without what differs between machines: below the packages, else below this project, else the name."""
    if _PACKAGES.match(path):
        return _PACKAGES.sub("", path)
    if Path(path).is_relative_to(_ROOT):
        return str(Path(path).relative_to(_ROOT))
    return Path(path).name
