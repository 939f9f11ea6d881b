"""Decides what becomes of a call that no recording fits because an input at a fixed address moved.

Parameters are swapped, and a function may write caches that the program chooses. Two recordings are made at one place
of the tree, as in stock. At the third set of addresses, every input that moved becomes an ordinary input of the
function: the function is recorded once more, replays copy the input, and `in_place.session` reads it in place where
that is known. Earlier recordings stay for their addresses.

Note [Inputs that cannot be copied]. A copy would be written instead of an input that the graph writes, or read instead
of memory that the graph writes through another input. Results in graph memory move with what is held. And copies need
room. Such an input stays at its fixed address. An existing recording is patched for it where every use is known by
construction (`in_place.patched_inputs`). Otherwise there are at most `MOST_RECORDINGS`, and calls that fit none of
them run without a graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.graph.memory_ranges import MemoryRanges
from optimizations.graph.pools import pool_memory
from optimizations.in_place import examination
from optimizations.in_place.budget import waiting_for_memory
from optimizations.trees.alike import tell_ranks
from optimizations.trees.function import RecordableFunction
from optimizations.trees.node import EncoreNode
from optimizations.trees.pool_manager import PoolManager

INPUT_KEEPS_MOVING = "an input keeps moving that can be neither copied nor patched into the graph"
"""Why calls, and in the end a function, run without a graph. Note [Inputs that cannot be copied]."""

RECORDINGS_AT_FIXED_ADDRESSES = 2
"""Recordings that differ in nothing but fixed addresses before what moved becomes an ordinary input."""

RECORDED_IN_VAIN = 512
"""Recordings in a row of which none was ever replayed, before a function is left without a graph: more than the calls
of an iteration. A forward without a backward, whose last result is held in each call, would be recorded in each."""

BACKWARDS_RECORDED_IN_VAIN = 32
"""The same for a backward where results of forwards are copied out: what a forward saved then lies elsewhere each time.
"""

MOST_RECORDINGS = 8
"""Recordings of one function at one place for addresses of inputs that can be neither copied nor patched. A function
that writes an input has as many for each of its calls in an iteration, wherever they are: each call's buffer may be
chosen apart from the others', and every choice would lead to other places.
"""

MOST_MISFITS = 64
"""Iterations in a row in which calls of a function fit no recording because an input keeps moving, until the function
is left without a graph for good."""


class MovedInputsManager(PoolManager):
    """A manager that decides about calls that no recording fits."""

    running_forwards_with_pending_backwards: bool

    def _function(self, function_id: Any) -> RecordableFunction:
        function: RecordableFunction = self.ids_to_funcs[function_id].model
        return function

    def may_begin_within_iteration(self) -> bool:
        """Return whether a fast-path call may begin a path where results of the one before are dead: no backward
        belongs to it."""
        return not self.running_forwards_with_pending_backwards

    # Recordings

    def _not_recorded_again(self, function_id: Any, inputs: Sequence[Any]) -> str | None:
        """Return why a call runs without a graph instead of being recorded; None where it may be recorded."""
        function = self._function(function_id)
        reason = self._against_one_more_recording(function, function_id, inputs)
        if reason is None:
            return None
        if reason != INPUT_KEEPS_MOVING:
            function.without_graph = reason
        elif function.misfits_in_a_row() > MOST_MISFITS * function.calls_on_a_path:
            function.without_graph = reason
            function.retire()
        if function.without_graph is not None:
            tell_ranks(function)
        return reason

    def _has_many(self, function: RecordableFunction) -> bool:
        """Return whether it writes an input, and has as many recordings as such a function may have."""
        most = MOST_RECORDINGS * function.calls_on_a_path
        return bool(function.written_inputs) and function.recorded_now() >= most

    def _against_one_more_recording(
        self, function: RecordableFunction, function_id: Any, inputs: Sequence[Any]
    ) -> str | None:
        """Return why a function is not recorded again: no recording is ever replayed, or there are too many."""
        siblings = self._recorded_behind(self.current_node, function_id)
        if self._has_many(function) or (function.written_inputs and len(siblings) >= MOST_RECORDINGS):
            return INPUT_KEEPS_MOVING
        fixed = set(self.ids_to_funcs[function_id].static_input_idxs)
        if sum(1 for one in siblings if not fixed.isdisjoint(one.moved_inputs(inputs))) >= MOST_RECORDINGS:
            return INPUT_KEEPS_MOVING
        most = RECORDED_IN_VAIN
        if function.direction == "backward" and self._forwards_are_copied_out:
            most = BACKWARDS_RECORDED_IN_VAIN
        made = function.recorded_in_vain()
        return f"{made} recordings of it were made, and none was replayed" if made >= most else None

    # Inputs that moved

    def _fitted_to_moved_inputs(self, inputs: list[Any], function_id: Any) -> EncoreNode | None:
        """Let inputs move that came to a third address. Return an existing recording that now fits the call, or None.

        What can be copied becomes an ordinary input of the next recording; for what cannot, a recording is patched.
        """
        moved = [
            (node, indices)
            for node in self._recorded_at_this_call(function_id)
            if (indices := node.moved_inputs(inputs))
        ]
        if len(moved) < RECORDINGS_AT_FIXED_ADDRESSES and not (moved and self._has_many(self._function(function_id))):
            return None
        candidates = {index for _, indices in moved for index in indices}
        ordinary = self._can_be_copied(candidates, inputs, function_id, moved[0][0].free_bytes())
        if ordinary:
            self._make_ordinary(ordinary, function_id)
        # A recording that fits but for what cannot be copied, the latest first.
        fixed = set(self.ids_to_funcs[function_id].static_input_idxs)
        siblings = self._recorded_behind(self.current_node, function_id)
        for node, indices in reversed(moved):
            if node in siblings and fixed.issuperset(indices) and self._patched(node, inputs, indices):
                return node
        return None

    def _recorded_at_this_call(self, function_id: Any) -> list[EncoreNode]:
        """Return the recordings of a function that serve the same one of its calls in an iteration.

        What was recorded before may have been recorded again for other addresses, so they lie at different places.
        """
        function = self._function(function_id)
        number = _calls(self.current_node, function) + 1
        return [one for one in self.nodes() if one.function is function and _calls(one, function) == number]

    def _can_be_copied(
        self, candidates: Iterable[int], inputs: Sequence[Any], function_id: Any, free_bytes: int
    ) -> set[int]:
        """Return those of the inputs that a graph may read in a copy. Note [Inputs that cannot be copied]."""
        wrapped = self.ids_to_funcs[function_id]
        mutated = {*wrapped.mutated_input_idxs, *self._function(function_id).written_inputs}
        written = {_storage(inputs[index]) for index in mutated if isinstance(inputs[index], torch.Tensor)}
        pool = MemoryRanges(pool_memory(self.cuda_graphs_thread_pool))
        found = {
            index
            for index in set(candidates).intersection(wrapped.static_input_idxs)
            if examination.ineligible_reason(inputs[index]) is None
            and _storage(inputs[index]) not in written
            and inputs[index].data_ptr() not in pool
        }
        needed = sum(inputs[index].nbytes for index in found)
        return found if waiting_for_memory(needed, free_bytes) is None else set()

    def _make_ordinary(self, indices: set[int], function_id: Any) -> None:
        wrapped = self.ids_to_funcs[function_id]
        static = [index for index in wrapped.static_input_idxs if index not in indices]
        self.ids_to_funcs[function_id] = dataclasses.replace(wrapped, static_input_idxs=static)
        self._function(function_id).ordinary_inputs |= indices

    def _patched(self, node: EncoreNode, inputs: list[Any], indices: Iterable[int]) -> bool:
        """Return whether a recording was patched so that it fits a call in which these inputs moved."""
        node.patch_inputs(indices)
        statuses = torch_internals.cudagraph_utils.CheckInvariantStatus
        return not node.moved_inputs(inputs) and node.check_invariants(inputs)[0] is statuses.SUCCESS


def _calls(node: Any, function: RecordableFunction) -> int:
    """Return how many calls of a function there are on the path of a recording, its own among them."""
    path = node._path_from_root if isinstance(node, EncoreNode) else ()
    return sum(1 for one in path if one.function is function)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
