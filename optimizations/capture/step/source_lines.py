"""The line of the user's program that runs now."""

from __future__ import annotations

import sys
import types
from pathlib import Path

_ENCORE = str(Path(__file__).resolve().parents[2])
_LIBRARIES = ("/torch/", "/site-packages/", "/dist-packages/", "/contextlib.py", "/functools.py")


def current_line() -> str | None:
    """ "path:number in function" of the innermost frame that is neither Encore's nor a library's, if there is one."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None


def line_of(error: BaseException) -> str | None:
    """The same for where an exception was raised."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_users(code.co_filename):
            found = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found


def _is_users(path: str) -> bool:
    return not path.startswith((_ENCORE, "<")) and not any(part in path for part in _LIBRARIES)
