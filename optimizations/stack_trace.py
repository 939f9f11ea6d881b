"""Parse the frames of a stack trace as Python prints it, find the user's, and write an error in one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_FRAME = re.compile(
    r'File "(?P<path>[^"]+)", line (?P<number>\d+), in (?P<function>[^\n]+)(?:\n(?!\s*File ")(?P<code>[^\n]+))?'
)
_TORCH = re.compile(r".*/(?:site|dist)-packages/torch/")


@dataclass(frozen=True, slots=True)
class Frame:
    """Hold one frame of a stack trace. `code` is "" where the trace does not quote it."""

    path: str
    number: int
    function: str
    code: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.number} in {self.function}"
        return f"{place}: {self.code}" if self.code else place


def frames(stack_trace: str) -> list[Frame]:
    """Return the frames of a trace, outermost first. Text that is not a frame is skipped."""
    return [
        Frame(match["path"], int(match["number"]), match["function"].strip(), (match["code"] or "").strip())
        for match in _FRAME.finditer(stack_trace)
    ]


def reason_and_frame(message: str) -> tuple[str, Frame | None]:
    """Return one of Inductor's messages as (reason, the user's frame), without its set phrase and trace."""
    reason, _, trace = message.partition("Found from")
    return reason.strip().rstrip(". \n").removeprefix("skipping cudagraphs due to "), user_frame(trace)


def user_frame(stack_trace: str | None) -> Frame | None:
    """Return the innermost frame outside PyTorch, or inside if all are; None without a frame.

    A call of a PyTorch module from the user's code counts as the user's line, not the line inside the module.
    """
    return frame_of_program(frames(stack_trace or ""))


def frame_of_program(found: Sequence[Frame]) -> Frame | None:
    """Return the last of these frames that is outside PyTorch, or the last of all if none is; None if there is none."""
    outside = [frame for frame in found if not _TORCH.match(frame.path)]
    return (outside or found)[-1] if found else None


def one_line(error: BaseException) -> str:
    """Return the first line of an error, after its name, for reasons in reports and warnings."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
