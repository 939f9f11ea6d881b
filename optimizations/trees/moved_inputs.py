"""Decide how to run a call that fits no recording because an input at a fixed address moved.

Parameters may be replaced, and a function may write caches that the program chooses. Two recordings are made at one
node of the tree, as in stock. At the third set of addresses, every input that moved becomes an ordinary input of the
function: the function is recorded once more, replays copy the input, and `in_place.session` makes replays read it in
place if possible. Earlier recordings remain for their addresses.

Note [A block for many layers]. A block that is compiled once is called with the weights of each layer, and in inference
each call begins an iteration. These weights have not moved: they are alive, and later calls pass them again. So a
recording of an inference whose inputs at fixed addresses are all alive does not count here, and there is one for each
layer, as in stock. A program may also keep every set of weights alive and never pass one again. So after `MOST_LAYERS`
consecutive recordings without a replay, all of them count. They also count for a function that writes inputs of the
program, which stock runs without a graph: there may be a new cache in each call.

Note [Inputs that cannot be copied]. If the graph writes an input, it would write the copy instead. If the graph writes
memory through another input, it would read a stale copy. Results in graph memory move as other results live or die. And
copies need memory. Such an input stays at its fixed address: `MOST_RECORDINGS` are made, and calls that fit none of
them run without a graph. More are made, up to stock's own limit, while each is replayed several times on average: text
is generated with a new cache for each prompt, which is read and written once for each token, and whose memory the
allocator soon provides again.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from optimizations.graph.memory import MemoryRanges, storage_of
from optimizations.graph.pools import pool_memory
from optimizations.in_place import examination
from optimizations.in_place.budget import waiting_for_memory
from optimizations.trees.function import RecordableFunction
from optimizations.trees.node import EncoreNode
from optimizations.trees.reasons import INPUT_KEEPS_MOVING

RECORDINGS_AT_FIXED_ADDRESSES = 2
"""Recordings that differ only in fixed addresses, before the moved inputs become ordinary inputs."""

MOST_LAYERS = 128
"""Consecutive recordings without a replay before live weights count as moved: more than the layers of the largest
models. Note [A block for many layers]."""

MOST_USELESS_RECORDINGS = 512
"""Consecutive recordings without a replay before a function runs without a graph: more than the calls of an iteration.
A forward without a backward whose last result is live in each call would be recorded on every call."""

MOST_USELESS_BACKWARDS = 32
"""The same for a backward if results of forwards are copied out: saved tensors then have new addresses each time."""

MOST_RECORDINGS = 8
"""Most recordings of one function at one node of the tree for addresses of inputs that cannot be copied. A function
that writes an input may have as many for each of its calls in an iteration, at all nodes together: each call's buffer
may be chosen independently, so the number of nodes would multiply.
"""

REPLAYS_OF_USEFUL_RECORDINGS = 4
"""Replays of each recording on average, with which more than `MOST_RECORDINGS` are made where stock makes them, too.
Note [Inputs that cannot be copied]."""

MOST_MISFITS = 64
"""Consecutive iterations in which a function's calls fit no recording because an input keeps moving, before the
function runs without a graph permanently."""


def has_moved_away(node: EncoreNode, useless: int) -> bool:
    """Return whether a recording that does not fit a call was made for addresses that will not be passed again.

    `useless`: how many recordings of the function were made since the last one that was ever replayed.
    """
    if node.function.direction != "inference" or node.function.written_inputs:
        return True
    return useless >= MOST_LAYERS or not node.may_come_back()


def calls_on_path(node: Any, function: RecordableFunction) -> int:
    """Return how many calls of a function are on the path of a recording, including its own."""
    path = node._path_from_root if isinstance(node, EncoreNode) else ()
    return sum(1 for one in path if one.function is function)


def by_call(function: RecordableFunction) -> defaultdict[int, list[EncoreNode]]:
    """Return the recordings of a function, by the number of the call in an iteration that they were made for.

    Earlier functions of the path may have several recordings, so those for one call may have different parents.
    """
    found = defaultdict(list)
    for one in function.nodes():
        found[calls_on_path(one, function)].append(one)
    return found


def has_many(recorded: Sequence[EncoreNode], function: RecordableFunction) -> bool:
    """Return whether a function writes an input, and has as many recordings for one of its calls as it may have."""
    return bool(function.written_inputs) and len(recorded) >= MOST_RECORDINGS


def against_one_more_recording(
    inputs: Sequence[Any],
    wrapped: Any,
    recorded: Sequence[EncoreNode],
    siblings: Sequence[EncoreNode],
    copied_out: bool,
) -> str | None:
    """Return why a function is not recorded again: no recording is ever replayed, or there are too many.

    Args:
        inputs: the inputs of the call.
        wrapped: the function, as stock keeps it (`WrappedFunction`).
        recorded: its recordings for the same one of its calls in an iteration.
        siblings: its recordings at this node of the tree.
        copied_out: whether it is a backward whose forward's results may be copied out of graph memory.
    """
    function, fixed = wrapped.model, frozenset(wrapped.static_input_idxs if siblings else ())
    made = function.useless_recordings()
    away = [one for one in siblings if not fixed.isdisjoint(one.moved_inputs(inputs)) and has_moved_away(one, made)]
    seldom = sum(one.replays for one in away) < REPLAYS_OF_USEFUL_RECORDINGS * len(away)
    if has_many(recorded, function) or (len(away) >= MOST_RECORDINGS and seldom):
        return INPUT_KEEPS_MOVING
    most = MOST_USELESS_BACKWARDS if copied_out else MOST_USELESS_RECORDINGS
    return f"{made} recordings of it were made, and none was replayed" if made >= most else None


def can_be_copied(inputs: Sequence[Any], wrapped: Any, recorded: Sequence[EncoreNode], pool: Any) -> set[int]:
    """Return the inputs that moved to a third address, and that a graph may read from a copy.

    Note [Inputs that cannot be copied]. `pool` is the handle of graph memory; see
    `against_one_more_recording` for the other arguments.
    """
    useless = wrapped.model.useless_recordings()
    moved = [indices for node in recorded if (indices := node.moved_inputs(inputs)) and has_moved_away(node, useless)]
    if not moved or (len(moved) < RECORDINGS_AT_FIXED_ADDRESSES and not has_many(recorded, wrapped.model)):
        return set()
    mutated = {*wrapped.mutated_input_idxs, *wrapped.model.written_inputs}
    written = [storage_of(inputs[index]) for index in mutated if isinstance(inputs[index], torch.Tensor)]
    overwritten = MemoryRanges([*pool_memory(pool), *written])
    found = {
        index
        for index in {*itertools.chain(*moved)}.intersection(wrapped.static_input_idxs)
        if examination.ineligible_reason(inputs[index]) is None and inputs[index].data_ptr() not in overwritten
    }
    needed = sum(inputs[index].nbytes for index in found)
    return found if waiting_for_memory(needed, recorded[0].tools.free_bytes()) is None else set()
