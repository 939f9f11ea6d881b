"""Managers that know when a function is recorded once more, and when a recording is patched instead.

Inputs at fixed addresses move: parameters that are swapped, caches that a function writes and the program chooses. A
few recordings are made, then one is patched for whatever comes (`recording.fixed_inputs`), and where neither is of use
the function is left without a graph.

Note [Trials of moved inputs]. A call in which `recording.fixed_inputs` tries something out leaves no place in the tree,
so a function that comes behind it would be recorded where it never comes again. Each function runs without a graph once
until the next iteration begins.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from optimizations import torch_internals
from optimizations.capture.trees.alike import tell_ranks
from optimizations.capture.trees.function import RecordableFunction
from optimizations.capture.trees.node import EncoreNode
from optimizations.capture.trees.pool_manager import PoolManager
from optimizations.recording.fixed_inputs import Answer

trees = torch_internals.cudagraph_trees

BEHIND_A_TRIAL = "an input at a fixed address of a function before it moved, and patching it was being tried out"

WRITTEN_INPUT_MOVES = "an input that it writes keeps moving, and the graph cannot be patched for it"
"""Why a function is left as stock leaves it after all. Note [Inputs that are written] in `function`."""

RECORDINGS_BEFORE_FOLLOWING = 2
"""As many recordings differ in nothing but fixed addresses before these are patched instead."""

RECORDED_IN_VAIN = 512
"""Recordings in a row of which none was ever replayed, before a function is left without a graph: more than the calls
of an iteration. A forward without a backward, whose last result is held in each call, would be recorded in each."""

BACKWARDS_RECORDED_IN_VAIN = 32
"""The same for a backward where results of forwards are copied out: what a forward saved then lies elsewhere each time.
"""

MOST_RECORDINGS = 8
"""Recordings of one function at one place for sets of addresses that come back; see `replay.swaps`. A function
that writes an input has as many for each of its calls in an iteration, wherever they are: each call's buffer may be
chosen apart from the others', and every choice would lead to other places.
"""

MOST_MISFITS = 64
"""Iterations in a row in which calls of a function that writes an input fit no recording, and none is made for them,
until it is left without a graph for good."""


class FollowingManager(PoolManager):
    """What a manager does with calls that no recording fits."""

    _ran_uncaptured: bool
    running_forwards_with_pending_backwards: bool

    def __init__(self, device_index: int, **keywords: Any) -> None:
        self._tried: Counter[Any] = Counter()
        self._tried_at: tuple[Any, int] = None, 0
        super().__init__(device_index, **keywords)

    def _function(self, function_id: Any) -> RecordableFunction:
        function: RecordableFunction = self.ids_to_funcs[function_id].model
        return function

    # Trials

    def _is_behind_a_trial(self, function_id: Any) -> bool:
        """Note [Trials of moved inputs]."""
        if not self._tried:
            return False
        # A steady call does not pass here: where one was made since, that iteration is over.
        replayed = self._tried_at != (self._get_node_id(), self.current_gen)
        again = self._tried[function_id] >= self._function(function_id).calls_on_a_path
        if replayed or self._at_boundary() or again:
            self._tried.clear()
            return False
        self._runs_in_a_trial(function_id)
        return True

    def may_begin_within_iteration(self) -> bool:
        """Whether a steady call may begin a path where results of the one before it are dead: no backward belongs to
        it, and nothing was tried out, which leaves no place in it."""
        return not self.running_forwards_with_pending_backwards and not self._tried

    def _runs_in_a_trial(self, function_id: Any) -> None:
        self._tried[function_id] += 1
        self.update_generation()
        self._tried_at = self._get_node_id(), self.current_gen

    # Recordings

    def _not_recorded_again(self, function_id: Any) -> str | None:
        """Why a call is served without a graph instead of being recorded; None where it may be recorded."""
        function = self._function(function_id)
        reason = self._against_one_more_recording(function, function_id)
        if reason is None:
            return None
        if reason != WRITTEN_INPUT_MOVES:
            function.without_graph = reason
        elif function.misfits_in_a_row() > MOST_MISFITS * function.calls_on_a_path:
            function.without_graph = reason
            function.retire()
        if function.without_graph is not None:
            tell_ranks(function)
        return reason

    def _has_many(self, function: RecordableFunction) -> bool:
        """Whether it writes an input, and there are as many recordings of it as there may be of such a function."""
        most = MOST_RECORDINGS * function.calls_on_a_path
        return bool(function.written_inputs) and function.recorded_now() >= most

    def _against_one_more_recording(self, function: RecordableFunction, function_id: Any) -> str | None:
        """Why a function is not recorded again: its recordings are never replayed, or there are too many."""
        behind = self._recorded_behind(self.current_node, function_id)
        if self._has_many(function) or (function.written_inputs and len(behind) >= MOST_RECORDINGS):
            return WRITTEN_INPUT_MOVES
        most = RECORDED_IN_VAIN
        if function.direction == "backward" and self._forwards_are_copied_out:
            most = BACKWARDS_RECORDED_IN_VAIN
        made = function.recorded_in_vain()
        return f"{made} recordings of it were made, and none was replayed" if made >= most else None

    def _followed(self, inputs: list[Any], function_id: Any) -> tuple[Any] | None:
        """The results of a call that no recording fits because parameters moved; None where it is to be recorded."""
        siblings = self._recorded_behind(self.current_node, function_id)
        moved = [(node, node.fixed_inputs) for node in siblings if node.moved_fixed_input and node.fixed_inputs]
        function = self._function(function_id)
        many = self._has_many(function)
        few = len(moved) < RECORDINGS_BEFORE_FOLLOWING and not many
        if not moved or (few and not self._behind_one_that_follows()):
            return None
        # One that is patched already may follow other inputs than those that moved now. Another may learn of these.
        may_look = function.may_be_looked_at
        willing = [one for one in moved if one[1].refused is None and one[1].may_serve(inputs, may_look=may_look)]
        if not willing:
            return None
        node, fixed_inputs = next((one for one in willing if one[1].following), willing[0])
        if node.prefers_recording(inputs):
            assert node.swaps is not None
            if len(siblings) < MOST_RECORDINGS and not many:
                node.swaps.recorded()
                return None
            node.swaps.close()

        def run(arguments: list[Any]) -> Any:
            function.ran_without_graph("an input at a fixed address moved, and patching it was being tried out")
            return function(arguments)

        known = fixed_inputs.looked
        answer, results = fixed_inputs.moved(inputs, run)
        node.look_at_session()
        if fixed_inputs.looked_in_vain or (answer is Answer.RECORD and fixed_inputs.looked and not known):
            function.looked_in_vain()
        self._patched_last(function_id, node.parent)
        if answer is Answer.SERVED:
            self._ran_uncaptured = True
            self._tried.clear()
            self._runs_in_a_trial(function_id)
            return (results,)
        if answer is Answer.REPLAY:
            statuses = torch_internals.cudagraph_utils.CheckInvariantStatus
            if node.check_invariants(inputs)[0] is statuses.SUCCESS:
                return (self.execute_node(node, inputs),)
        return None

    def _behind_one_that_follows(self) -> bool:
        """Whether the call comes behind a recording whose inputs at fixed addresses are patched.

        There is one recording for all their addresses then, and what follows it has to get along with them too.
        """
        node = self.current_node
        return isinstance(node, EncoreNode) and any(
            one.fixed_inputs is not None and one.fixed_inputs.following for one in node._path_from_root
        )

    def _patched_last(self, function_id: Any, parent: EncoreNode | None) -> None:
        """A recording that was made for a call's addresses comes before one that would have to be patched to them."""
        siblings = self._recorded_behind(parent, function_id)
        siblings.sort(key=lambda one: one.fixed_inputs is not None and bool(one.fixed_inputs.following))
