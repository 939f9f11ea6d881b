"""The line of a user's program in a stack trace, written the same way on every machine."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from optimizations.stack_trace import Frame, user_frame

_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
_ROOT = Path(__file__).resolve().parents[1]


def user_line(stack_trace: str | None) -> str | None:
    """The innermost line of `stack_trace` outside PyTorch, as "path:line in function: code"; None without a frame."""
    frame = user_frame(stack_trace)
    return None if frame is None else line_of_frame(frame)


def line_of_frame(frame: Frame) -> str:
    """A frame as "path:line in function: code"."""
    return str(replace(frame, path=short_path(frame.path)))


def reason_and_line(message: str) -> tuple[str, str | None]:
    """One of Inductor's messages as (reason, the user's source line), the stack trace at its end taken off."""
    reason, _, trace = message.partition("Found from")
    return reason.strip().rstrip(". \n"), user_line(trace)


def short_path(path: str) -> str:
    """`path` without what differs between machines: below the packages, else below this project, else the name."""
    if _PACKAGES.match(path):
        return _PACKAGES.sub("", path)
    if Path(path).is_relative_to(_ROOT):
        return str(Path(path).relative_to(_ROOT))
    return Path(path).name
