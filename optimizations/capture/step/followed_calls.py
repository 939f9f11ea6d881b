"""Watches, while a step runs, whether calls that numbers are handed on to reach the functions that they were found to.

A step may exchange a function and put it back in one call, which shows neither before the call nor behind it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_OWN = (str(Path(__file__).resolve().parents[2]), str(Path(torch.__file__).resolve().parent))


@dataclass(frozen=True, slots=True)
class CallSite:
    """A call in `caller`, at these bytes of its instructions, that should reach `callee`."""

    caller: types.CodeType
    at: range
    callee: types.CodeType


class FollowedCalls:
    """A block in which calls are watched, in this thread, by Python's profiling.

    Attributes:
        differ: whether one reached another function, a function looked at the variables of others, or the calls could
            not be watched, because the program profiles.
    """

    def __init__(self, sites: Iterable[CallSite]) -> None:
        self.differ = False
        self._codes: list[types.CodeType] = []  # whose ids are taken: comparing code takes long
        self._callees: dict[int, dict[int, set[int]]] = {}
        for site in sites:
            self._codes += [site.caller, site.callee]
            offsets = self._callees.setdefault(id(site.caller), {})
            for offset in site.at:
                offsets.setdefault(offset, set()).add(id(site.callee))
        self._looked_at: dict[int, types.CodeType] = {}

    def __enter__(self) -> FollowedCalls:
        if sys.getprofile() is not None:
            self.differ = True
        else:
            sys.setprofile(self._see)
        return self

    def __exit__(self, *raised: object) -> None:
        if sys.getprofile() == self._see:
            sys.setprofile(None)
        else:
            self.differ = True

    def _see(self, frame: types.FrameType, event: str, value: Any) -> None:
        if event == "call":
            code, caller = frame.f_code, frame.f_back
            if id(code) not in self._looked_at:
                self._looked_at[id(code)] = code
                self.differ = self.differ or reads_frames(code)
            if caller is None or (callees := self._callees.get(id(caller.f_code))) is None:
                return
            reached = callees.get(caller.f_lasti)
            if reached is not None and id(code) not in reached:
                self.differ = True
        elif event == "c_call":
            callees = self._callees.get(id(frame.f_code))
            if callees is not None and frame.f_lasti in callees:
                self.differ = True


def reads_frames(code: types.CodeType) -> bool:
    """Whether code looks at variables of other functions, as libraries of tables do."""
    return "f_locals" in code.co_names and not code.co_filename.startswith(_OWN)
