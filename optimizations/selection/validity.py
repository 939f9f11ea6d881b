"""Whether a verdict still holds: looked at in a few consecutive calls now and then.

Note [What makes a verdict void]. Inputs whose addresses moved from call to call and do not any more, or the other way
round: reading in place may pay off now. Another stream, for as many calls as a look has: a program that goes from one
stream to another and back in each iteration has always been on both. A new shape is another function, with a verdict of
its own. And a graph that could only copy its inputs when it was measured, for memory was short then, may read them in
place later: that is one more candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.selection.movement import Movement

WINDOW = 9
"""Consecutive calls of one look."""

ANOTHER_STREAM = "the program went on to another stream"
MOVES_NOW = "inputs move from call to call now"
RESTS_NOW = "inputs do not move from call to call any more"
READ_IN_PLACE_NOW = "a graph reads inputs in place now, which none could when it was measured"


class Circumstances:
    """Under which the leader of a group is called: its stream, and whether its inputs move.

    Attributes:
        moving: whether they did when that was last found out; None where it never was.
    """

    def __init__(self) -> None:
        self.moving: bool | None = None
        self._stream: int | None = None
        self._elsewhere = 0
        self._movement = Movement()
        self._window = 0

    def restart(self) -> None:
        """Forget the calls seen, and keep what they showed."""
        self._movement.restart()
        self._window = 0

    def another_stream(self, device_index: int) -> bool:
        """Whether this call and those before it, as many as a look has, were not on the stream of all before.

        To be asked once for each call that is looked at.
        """
        stream = torch_internals.current_raw_stream(device_index)
        if self._stream in (None, stream):
            self._stream, self._elsewhere = stream, 0
            return False
        self._elsewhere += 1
        if self._elsewhere < WINDOW:
            return False
        self._stream, self._elsewhere = stream, 0
        return True

    def note(self, inputs: Sequence[Any], watched: Sequence[int]) -> None:
        """A call's inputs, of which these may move."""
        found = (inputs[index] for index in watched)
        self._movement.note([value.data_ptr() if isinstance(value, torch.Tensor) else 0 for value in found])

    def conclude(self) -> bool:
        """Whether inputs move, by the calls since `restart`."""
        if self._movement.says_something:
            self.moving = self._movement.moves(bool(self.moving))
        return bool(self.moving)

    @property
    def begins_look(self) -> bool:
        """Whether the next call is the first of a look."""
        return self._window == 0

    def look(self, inputs: Sequence[Any], watched: Sequence[int]) -> bool:
        """One more call of a look, which has `WINDOW` of them; whether it was the last."""
        if self._window == 0:
            self._movement.restart()
        self.note(inputs, watched)
        self._window = (self._window + 1) % WINDOW
        return self._window == 0

    def changed(self) -> str | None:
        """After a look: what is not as it was; None where everything is."""
        before = self.moving
        if self.conclude() == before or before is None:
            return None
        return MOVES_NOW if self.moving else RESTS_NOW
