"""Interrupts where Python lets them happen: behind a call of something in C."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupted_behind(call: int, *files: str) -> Iterator[list[str]]:
    """A KeyboardInterrupt behind the call-th call into C that these files make; yields where that was."""
    left = [call]
    found: list[str] = []

    def profile(frame: FrameType, event: str, function: Any) -> None:
        if event != "c_return" or found or not frame.f_code.co_filename.endswith(files):
            return
        left[0] -= 1
        if left[0] < 0:
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}, {getattr(function, '__name__', function)}")
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(before)
