"""The memory pool of a manager's graphs: who holds results in it, and when it is left to them.

Note [Kept results]. Results lie in the graphs' memory pool, and the next call of the program would overwrite them.
Stock does so, held or not, and lets access to them fail. Here a call that begins a new iteration first looks whether
somebody holds a result of the one before. If so,

* the function runs without a graph, in ordinary memory, and overwrites nothing;
* that result is marked, by its function and place: from then on it is copied out of the pool right after each launch,
  so that nobody can hold it in there again;
* after `PATIENCE` iterations in which something was still held, the pool is left to those who hold it, and everything
  is recorded again in a new one. Where several threads call it takes `PATIENCE_OF_THREADS`: what one of them holds is
  mostly let go soon, and a capture would disturb the others.

A program that holds nothing pays only for the look at what stock's own bookkeeping already knows.

Note [Results that outlive their functions]. Once the last function is gone, so are the graphs and their pool. Results
of replays lie there without owning their memory. So those that somebody still holds get it before the pool goes. Stock
leaves them in memory that belongs to nobody.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from optimizations import torch_internals
from optimizations.graph.pools import Pool, claim, give_back
from optimizations.in_place.budget import Together
from optimizations.one_line import one_line
from optimizations.torch_internals.stock_trees import forget_places
from optimizations.trees.lean import SteadyCall
from optimizations.trees.node import EncoreNode
from optimizations.trees.results import kept_copied

if TYPE_CHECKING:
    from optimizations.trees.function import RecordableFunction

trees = torch_internals.cudagraph_trees
CUDAGraphTreeManager: Any = trees.CUDAGraphTreeManager

PATIENCE = 4
"""Iterations in a row that run without graphs because results are held, before a new pool is begun."""

PATIENCE_OF_THREADS = 32
"""The same where several threads call."""

_exiting = threading.Event()
"""Set when the interpreter begins to exit: then nobody reads a result any more."""
atexit.register(_exiting.set)


class PoolManager(CUDAGraphTreeManager):
    """CUDAGraph Trees that overwrite no result somebody holds."""

    current_gen: int
    current_node: Any
    roots: dict[Any, list[EncoreNode]]

    def __init__(self, device_index: int, **keywords: Any) -> None:
        self._owner = os.getpid()
        self.held_in_generation: int | None = None
        self._held_iterations = 0
        self._checkpoint_due = False
        self.forgetting_is_due = False
        self._forwards_are_copied_out = False
        self._callers: set[int] = set()
        self._together = Together()
        self._pool: Pool | None = None
        self._steady: defaultdict[Any, dict[EncoreNode | None, list[SteadyCall]]] = defaultdict(dict)
        super().__init__(device_index, **keywords)  # makes a capture
        torch.cuda.current_stream(device_index).wait_stream(self.stream)  # see `graph.capture_order`
        claim(self.cuda_graphs_thread_pool)

    # Recordings, and what is made of them

    def nodes(self) -> Iterator[EncoreNode]:
        """All recordings. Other threads may record meanwhile."""
        roots = self.roots or {}
        for root in [one for recorded in list(roots.values()) for one in recorded]:
            yield from below(root)

    def _recorded_behind(self, parent: EncoreNode | None, function_id: Any) -> list[EncoreNode]:
        """The recordings of a function that follow another one, or begin an iteration (None): the tree's own list."""
        following: dict[Any, list[EncoreNode]] = self.roots if parent is None else parent.children
        return following.get(function_id, [])

    def _drop(self, node: EncoreNode) -> None:
        """Take a recording out of the tree, with all that follow it. Nobody holds a result of theirs."""
        siblings = self._recorded_behind(node.parent, node.wrapped_function.id)
        siblings[:] = [one for one in siblings if one is not node]
        if self.current_node is node:
            self.current_node = node.parent
        self._still_read(below(node))
        for one in below(node):
            one.remove_node_cached_tensors()
            one.release()
        self._forget_steady_calls()

    def _still_read(self, nodes: Iterable[EncoreNode]) -> None:
        """To be called before these are let go of: launches of theirs that are under way read memory of theirs."""
        raise NotImplementedError

    def _forget_steady_calls(self) -> None:
        for calls in self._steady.values():
            calls.clear()

    # Note [Kept results]

    def _at_boundary(self, *arguments: Any) -> bool:
        """Return whether this call begins an iteration that may overwrite the results of the one before."""
        return bool(super().can_start_new_generation(*arguments))

    def can_start_new_generation(self, *arguments: Any) -> bool:
        """As stock's, but False while results of the iteration before are live."""
        return self.held_in_generation is None and self._at_boundary(*arguments)

    def _look_for_held_results(self) -> None:
        generation = self.get_curr_generation()
        live = list(self.current_node.path_live_weakrefs())
        if live and self._histories_forgotten():
            live = list(self.current_node.path_live_weakrefs())
        if not live:
            self.held_in_generation = None
            self._held_iterations = 0
            return
        if self.held_in_generation != generation:
            self.held_in_generation = generation
            self._held_iterations += 1
            self._mark_kept({reference.data_ptr() for reference in live})
        patience = PATIENCE if any(self.roots.values()) else 0  # what was only warmed up is soon recorded
        if len(self._callers) > 1:
            patience = PATIENCE_OF_THREADS
        if self._held_iterations > patience:
            self.leave_pool()

    def _histories_forgotten(self) -> bool:
        return isinstance(self.current_node, EncoreNode) and self.current_node.forget_histories()

    def forget_all_histories(self) -> None:
        """Let go of the backwards that results of any recording refer to, and nobody holds.

        Called from anywhere, but not in the midst of a call.
        """
        if os.getpid() == self._owner and not _exiting.is_set():
            for node in self.nodes():
                node.forget_own_histories()

    def forget_due_histories(self) -> None:
        """Note [Models that are gone] in `manager`. At the end of a call."""
        self.forgetting_is_due = False
        self.forget_all_histories()

    def _mark_kept(self, addresses: set[int]) -> None:
        for node in self.current_node._path_from_root:
            function: RecordableFunction = node.wrapped_function.model
            for place, reference in enumerate(node.outputs_weakrefs):
                if reference is not None and reference.data_ptr() in addresses and trees.is_live(reference):
                    function.kept_outputs.add(place)
                    self._forwards_are_copied_out |= function.direction == "forward"

    def kept_copied(self, function: RecordableFunction, outputs: Any) -> Any:
        """The outputs of the call just served, those that the program keeps copied out of the pool."""
        return kept_copied(self.current_node, function, outputs)

    # The pool

    def _free_what_is_retired(self) -> None:
        """Free the graphs and their pool once no function that has some is to be served by one any more."""
        nodes = list(self.nodes())
        if nodes and all(node.function.retired for node in nodes) and len(self._callers) == 1:
            self.leave_pool()

    def _let_held_results_own_their_memory(self) -> None:
        """Results of a replay lie in the pool without owning their memory, and the pool is about to go."""
        node = self.current_node
        replayed = isinstance(node, EncoreNode) and self.path_state is trees.ExecutionState.EXECUTION
        if replayed and any(True for _ in node.path_live_weakrefs()):
            super().apply_checkpoint_execution_state_in_allocator()

    def outlived(self) -> None:
        """No function needs it any more. Note [Results that outlive their functions].

        Called from wherever the last function was let go of. A forked child has no device to talk to.
        """
        if os.getpid() != self._owner or _exiting.is_set():
            return
        try:
            self._let_held_results_own_their_memory()
            self._still_read(self.nodes())
        except Exception as error:
            reason = one_line(error)
            warnings.warn(
                f"Results of CUDA graphs that are gone may be overwritten; {reason}. This is a defect of Encore.",
                stacklevel=2,
            )

    def leave_pool(self) -> None:
        """Leave the memory pool to those who hold results in it, and begin a new one. Everything is recorded again."""
        self._let_held_results_own_their_memory()
        self._still_read(self.nodes())
        for node in list(self.nodes()):
            node.remove_node_cached_tensors()
            node.release()
        self._forget_steady_calls()
        self.current_node = None
        self.roots = defaultdict(list)
        forget_places(self)
        self.held_in_generation = None
        self._held_iterations = 0
        self._pool = Pool(self.device_index)  # kept by this, not by a capture
        self.cuda_graphs_thread_pool = self._pool.id
        self.graph = torch.cuda.CUDAGraph()  # stock's keeps its first pool, and nothing is ever captured in this one
        # Expandable segments are unmapped without waiting for replays. While another thread captures, the device cannot
        # be waited for. That is no reason for a call to fail: this memory is given back with what is freed next.
        with contextlib.suppress(RuntimeError):
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(self.device_index)
                give_back()

    def apply_checkpoint_execution_state_in_allocator(self) -> None:
        """As stock's, but put off until something is really allocated in the pool.

        It makes live results own their memory, which stock expects once on a path: a path that is replayed on after it
        could never be recorded on.
        """
        self._checkpoint_due = True

    def _apply_due_checkpoint(self) -> None:
        if self._checkpoint_due:
            self._checkpoint_due = False
            super().apply_checkpoint_execution_state_in_allocator()


def below(node: EncoreNode) -> Iterator[EncoreNode]:
    """A recording and all that follow it."""
    nodes = [node]
    while nodes:
        found = nodes.pop()
        yield found
        nodes.extend(found.following())
