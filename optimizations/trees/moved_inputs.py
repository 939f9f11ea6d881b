"""Decide what becomes of a call that no recording fits because an input at a fixed address moved.

Parameters are swapped, and a function may write caches that the program chooses. Two recordings are made at one place
of the tree, as in stock. At the third set of addresses, every input that moved becomes an ordinary input of the
function: the function is recorded once more, replays copy the input, and `in_place.session` reads it in place where
that is known. Earlier recordings stay for their addresses.

Note [A block for many layers]. A block that is compiled once is called with the weights of each layer, and in inference
each call begins an iteration. These weights have not moved: all of them are alive, and will be back. So a recording of
an inference whose inputs at fixed addresses are all alive does not count here, and there is one for each layer, as in
stock. A program may also hold every set of weights that it makes and never return to one. So after `MOST_LAYERS`
recordings in a row of which none was replayed, all of them count. Neither is this done for a function that writes what
the program passes, which stock leaves without a graph: there may be a new cache in each call.

Note [Inputs that cannot be copied]. A copy would be written instead of an input that the graph writes, or read instead
of memory that the graph writes through another input. Results in graph memory move with what is held. And copies need
room. Such an input stays at its fixed address: there are at most `MOST_RECORDINGS`, and calls that fit none of them run
without a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from optimizations.graph.memory import MemoryRanges
from optimizations.in_place import examination
from optimizations.in_place.budget import waiting_for_memory
from optimizations.trees.function import RecordableFunction
from optimizations.trees.node import EncoreNode
from optimizations.trees.reasons import INPUT_KEEPS_MOVING

RECORDINGS_AT_FIXED_ADDRESSES = 2
"""Recordings that differ in nothing but fixed addresses before what moved becomes an ordinary input."""

MOST_LAYERS = 128
"""Recordings in a row of which none was ever replayed, before weights that are alive count as moved: more than the
largest models have layers. Note [A block for many layers]."""

MOST_USELESS_RECORDINGS = 512
"""Recordings in a row of which none was ever replayed, before a function is left without a graph: more than the calls
of an iteration. A forward without a backward, whose last result is held in each call, would be recorded in each."""

MOST_USELESS_BACKWARDS = 32
"""The same for a backward where results of forwards are copied out: what a forward saved then lies elsewhere each time.
"""

MOST_RECORDINGS = 8
"""Recordings of one function at one place for addresses of inputs that cannot be copied. A function
that writes an input has as many for each of its calls in an iteration, wherever they are: each call's buffer may be
chosen apart from the others', and every choice would lead to other places.
"""

MOST_MISFITS = 64
"""Iterations in a row in which calls of a function fit no recording because an input keeps moving, until the function
is left without a graph for good."""


def has_moved_away(node: EncoreNode) -> bool:
    """Return whether a recording that does not fit a call was made for addresses that will not be back."""
    function = node.function
    if function.direction != "inference" or function.written_inputs:
        return True
    return function.useless_recordings() >= MOST_LAYERS or not node.may_come_back()


def has_many_recordings(function: RecordableFunction) -> bool:
    """Return whether a function writes an input, and has as many recordings as such a function may have."""
    most = MOST_RECORDINGS * function.calls_on_a_path
    return bool(function.written_inputs) and function.recorded_now() >= most


def against_one_more_recording(
    function: RecordableFunction,
    siblings: Sequence[EncoreNode],
    static: Iterable[int],
    inputs: Sequence[Any],
    *,
    forwards_are_copied_out: bool,
) -> str | None:
    """Return why a function is not recorded again: no recording is ever replayed, or there are too many.

    Args:
        function: the function.
        siblings: its recordings at this place of the tree.
        static: its inputs at fixed addresses.
        inputs: those of the call.
        forwards_are_copied_out: whether results of forwards are copied out of graph memory.
    """
    if has_many_recordings(function) or (function.written_inputs and len(siblings) >= MOST_RECORDINGS):
        return INPUT_KEEPS_MOVING
    fixed = set(static)
    away = [one for one in siblings if not fixed.isdisjoint(one.moved_inputs(inputs)) and has_moved_away(one)]
    if len(away) >= MOST_RECORDINGS:
        return INPUT_KEEPS_MOVING
    copied_out = function.direction == "backward" and forwards_are_copied_out
    most = MOST_USELESS_BACKWARDS if copied_out else MOST_USELESS_RECORDINGS
    made = function.useless_recordings()
    return f"{made} recordings of it were made, and none was replayed" if made >= most else None


def can_be_copied(
    candidates: Iterable[int], inputs: Sequence[Any], wrapped: Any, pool: Iterable[Any], free_bytes: int
) -> set[int]:
    """Return those of the inputs that a graph may read in a copy. Note [Inputs that cannot be copied].

    Args:
        candidates: inputs that moved.
        inputs: those of the call.
        wrapped: the function, as stock keeps it (`WrappedFunction`).
        pool: the memory of graphs.
        free_bytes: device memory that is free.
    """
    mutated = {*wrapped.mutated_input_idxs, *wrapped.model.written_inputs}
    written = {_storage(inputs[index]) for index in mutated if isinstance(inputs[index], torch.Tensor)}
    owned = MemoryRanges(pool)
    found = {
        index
        for index in set(candidates).intersection(wrapped.static_input_idxs)
        if examination.ineligible_reason(inputs[index]) is None
        and _storage(inputs[index]) not in written
        and inputs[index].data_ptr() not in owned
    }
    needed = sum(inputs[index].nbytes for index in found)
    return found if waiting_for_memory(needed, free_bytes) is None else set()


def calls_on_path(node: Any, function: RecordableFunction) -> int:
    """Return how many calls of a function there are on the path of a recording, its own among them."""
    path = node._path_from_root if isinstance(node, EncoreNode) else ()
    return sum(1 for one in path if one.function is function)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
