"""Addresses of parameters that come back: when another recording is cheaper than patching again.

A program that swaps weights mostly swaps between a few sets of them (adapters, averaged weights), and the allocator
gives the same addresses again and again. A recording for such a set is replayed without patching. Stock makes one at
once. Here it is made when patching for this set has cost a share of what a recording costs: a set that never comes back
costs no recording, and one that does costs little more than with stock.

Where many sets take turns they all reach that share at about the same time, and there would be one recording after the
other, each of which takes as long as a hundred calls that patch. So there is one at a time, when patching for all sets
has cost a whole recording since the last one: together they never cost more than patching did, over any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SHARE = 0.25
"""Of the cost of a recording: what patching for one set of addresses may cost before there is a recording for it."""

MOST_SETS = 64
"""Sets of addresses that are remembered. One that has not come back for so many others is forgotten."""


class Swaps:
    """What patching a recording to each set of addresses has cost.

    Args:
        indices: the inputs at fixed addresses that are patched.
        recording_s: what a recording costs, in seconds.
    """

    def __init__(self, indices: Sequence[int], recording_s: float) -> None:
        self._indices = tuple(indices)
        self._recording_s = recording_s
        self._patching_s: dict[int, float] = {}
        self._since_recorded_s = 0.0
        self._closed = False

    def patched(self, inputs: Sequence[Any], seconds: float) -> None:
        """To be told of each call in which one of them had moved."""
        if self._closed:
            return
        key = self._key(inputs)
        before = self._patching_s.pop(key, 0.0)
        if len(self._patching_s) >= MOST_SETS:
            del self._patching_s[next(iter(self._patching_s))]
        self._patching_s[key] = before + seconds
        self._since_recorded_s += seconds

    def worth_recording(self, inputs: Sequence[Any]) -> bool:
        """Whether patching for the addresses of these inputs has cost its share of a recording, and that for all sets
        of addresses a whole one since the last."""
        if self._closed or self._since_recorded_s < self._recording_s:
            return False
        return self._patching_s.get(self._key(inputs), 0.0) >= SHARE * self._recording_s

    def recorded(self) -> None:
        """To be told that a recording is made for a set of addresses that was worth it."""
        self._since_recorded_s = 0.0

    def close(self) -> None:
        """There are as many recordings as there may be."""
        self._closed = True
        self._patching_s.clear()

    def _key(self, inputs: Sequence[Any]) -> int:
        return hash(tuple([inputs[index].data_ptr() for index in self._indices]))
