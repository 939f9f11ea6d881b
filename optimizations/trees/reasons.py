"""Define the reasons why a call takes the slow path or runs without its graph, in words for `report()`."""

from __future__ import annotations

from typing import Any

NOT_RECORDED = "no recording of it is steady yet"
NOT_EXECUTING = "graphs were being recorded or warmed up before it"
OTHER_ORDER = "no recording of it follows the one before it"
FIXED_INPUT_MOVED = "an input at a fixed address moved"
INPUT_STILL_HELD = "the program holds an input that the graph would overwrite"
NOT_FOLLOWED = "an address in its graph could not be changed"
BACKWARD_PENDING = "a forward waits for its backward, and no step was marked"
ANOTHER_FOLLOWS = "it was recorded as a second call of an iteration, too"
WORK_IS_DUE = "work on its recording was due"
FORWARD_MODE = "derivatives are taken in forward mode"
OTHER_GEOMETRY = "an input at a fixed address has another shape, other strides or another dtype"
"""Why a call took the slow path, in addition to the reasons to run without a graph."""

KEPT = "the program holds a result that the graph would overwrite"
FORWARD_UNCAPTURED = "its forward ran without a graph"
INSIDE_CAPTURE = "it was called inside of a capture of the program's own"
INSIDE_FUNCTION = "it was called inside of a function whose graphs belong to another device"
RUNS_BACKWARD = "an operator in it runs the backward of another call, which no replay repeats"
RESET = "Encore was reset while the call waited"
INPUT_KEEPS_MOVING = "an input keeps moving that cannot be copied"
"""Why calls, and in the end a function, run without a graph. The last: Note [Inputs that cannot be copied]."""

WRITES_INPUT = "it writes an input that is neither a parameter nor a result of another graph"
RECORDED_TOO_OFTEN = "inputs at fixed addresses moved more often than Inductor's cudagraph_unexpected_rerecord_limit"
"""Why stock's code leaves a function without a graph."""


class NotLaunched(Exception):
    """Report that the recording chosen for a call cannot be replayed for it. Nothing was launched.

    Attributes:
        node: the recording.
        reason: the reason, as text.
        of_no_use: whether no call can replay it. Note [Addresses that cannot be changed].
    """

    def __init__(self, node: Any, reason: str, *, of_no_use: bool = False) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason
        self.of_no_use = of_no_use
