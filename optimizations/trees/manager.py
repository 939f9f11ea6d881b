"""Manage Encore's recordings: CUDAGraph Trees that overwrite no live result, and that survive failures.

`run` calls stock's `run`, with a check before it and bookkeeping after it.

Note [Kept results]. Results are in the graphs' memory pool, and the next iteration of the program would overwrite them.
Stock overwrites them even if they are referenced, and makes later access raise. Here a call that begins a new iteration
first checks whether a result of the previous iteration is live. If so,

* the function runs without a graph, in ordinary memory, and overwrites nothing;
* that result is marked, by its function and position: from then on it is copied out of the pool right after each
  launch, so that it cannot be live in the pool again;
* after `PATIENCE` iterations with live results, the pool is left to them, and everything is recorded again in a new
  pool. If several threads call, the limit is `PATIENCE_OF_THREADS`: another thread usually releases its results soon,
  and a capture would disturb the other threads.

If no result is live, the only cost is a query of stock's own bookkeeping.

Note [Results that outlive their functions]. When the last function is gone, the graphs and their pool are freed. The
results of replays are in that pool and do not own their memory. So live results get memory of their own before the pool
is freed. Stock leaves them in memory that has no owner.

Note [A recording that fails]. A capture runs nothing on the device, so the inputs are unchanged when it fails. The
function runs on them without a graph, and is never recorded again. If several threads call, another thread may have
ended the capture (it synchronized the device), so `FAILURES_OF_THREADS` recordings of a function may fail. Results of
earlier graphs among the inputs may be in memory that the failed capture freed, so they are copied out at once.

Note [Functions of several ranks]. NCCL requires a collective to be captured on all ranks or on none, and a rank cannot
see what the others do. So a function with collectives is warmed up, recorded and recorded again as stock does it. A
failure on one rank raises its error there, and the function keeps its graph.

Note [A warm-up that fails]. Memory is short or an index is out of range, and the program catches the error and
continues. Stock then keeps a warm-up without results for a call that should have some, and raises in every later call.
Here the failed warm-up is discarded, and the function is warmed up again.

Note [Results outside of the pool]. Before and after a warm-up, stock checks that the pool holds the results of
functions and nothing else. Stock raises if a function returned memory from elsewhere, or keeps memory of the pool. The
results are correct in both cases, so the caller gets them. The function runs without a graph from then on, and a new
pool is begun. If the check before the warm-up failed, another function was the cause.

Note [Uncaptured forwards]. A forward that ran without a graph has its saved tensors in ordinary memory, at new
addresses in each call. A backward assumes fixed addresses for saved tensors, so its recording would fit no later call.
Such a backward runs without a graph too. It is recognized by the storages of its inputs: each result of the forward is
marked, except parameters and results of graphs, which outlive the forward and are inputs of other calls as well.

Note [Results that die meanwhile]. Another thread, which may be autograd's, can release a result at any time. While
stock records a function, or gives live results ownership of their memory, it reads several times which are live. If one
died in between, its memory would be freed twice, and two tensors would get the same memory. So all live results are
referenced meanwhile, except the inputs of the function that is recorded.

Note [Memory that a warm-up reads]. A warm-up runs on a stream of its own, and the caller's stream waits for it at its
end. If an input in ordinary memory died in between, another thread could get its memory for work on the caller's
stream, and write it while the warm-up reads it. So a warm-up keeps these inputs until its end.

Note [Functions inside of functions]. A custom operator of the program may call a compiled function. While such an
operator is warmed up or recorded, the inner function runs without a graph of its own, and the outer graph contains its
kernels. It has none either where stock's code runs the outer function without a graph: what was decided for the outer
call, such as whether it begins an iteration, is not true of the inner one.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.calls.turns import inside_another
from optimizations.graph.pools import Pool, claim, end_failed_capture, failed_in_cusolver, give_back
from optimizations.stack_trace import one_line
from optimizations.torch_internals.geometry import FixedGeometry
from optimizations.torch_internals.stock_trees import forget_places, refuse_derivatives, with_globals
from optimizations.trees import hook, moved_inputs, reasons
from optimizations.trees.containers import container_of_call
from optimizations.trees.function import RecordableFunction
from optimizations.trees.node import EncoreNode
from optimizations.trees.process_ends import free_before_process_groups_end, in_a_process_group, several_ranks
from optimizations.trees.readable_seeds import any_on_host
from optimizations.trees.reasons import NotLaunched
from optimizations.trees.results import kept_copied
from optimizations.trees.streams import CallStreams

trees = torch_internals.cudagraph_trees
CUDAGraphTreeManager: Any = trees.CUDAGraphTreeManager

PATIENCE = 4
"""Consecutive iterations that run without graphs because results are live, before a new pool is begun."""

PATIENCE_OF_THREADS = 32
"""The same limit if several threads call."""

FAILURES_OF_THREADS = 3
"""If several threads call: recordings of a function that may fail before it runs without graphs."""

_exiting = threading.Event()
"""Set when the interpreter begins to exit: no result is read afterwards."""
atexit.register(_exiting.set)


class EncoreManager(CUDAGraphTreeManager):
    """Manage CUDAGraph Trees whose functions are `RecordableFunction`s and whose nodes are `EncoreNode`s.

    Attributes:
        turn: the lock that each call holds. Note [Threads] in `streams`.
        running: whether a call is on the slow path.
        held_in_generation: the iteration during which results of the previous one are live; None if none are.
        streams: see its class.
    """

    current_gen: int
    current_node: Any
    roots: dict[Any, list[EncoreNode]]
    running_forwards_with_pending_backwards: bool

    _add_function = with_globals(CUDAGraphTreeManager.add_function, get_container=container_of_call)
    _record_function = with_globals(CUDAGraphTreeManager.record_function, CUDAGraphNode=EncoreNode)

    def __init__(self, device_index: int, **keywords: Any) -> None:
        self._owner = os.getpid()
        self.turn = threading.RLock()
        self.streams = CallStreams(device_index)
        self._marks: dict[int, Any] = {}  # live storages that forwards without a graph returned
        self.running = False
        self.held_in_generation: int | None = None
        self._held_iterations = 0
        self._begins = False  # whether the call in progress begins an iteration
        self._inputs: list[Any] | None = None  # of the call in progress on the slow path
        self._checkpoint_due = False
        self._runs_function = False
        self._captured: bool | None = None  # whether the call in progress ran with a graph; None: stock's code ran it
        self._pool: Pool | None = None
        super().__init__(device_index, **keywords)  # makes a capture
        torch.cuda.current_stream(device_index).wait_stream(self.stream)  # see `graph.pools`
        claim(self.cuda_graphs_thread_pool)

    def _function(self, function_id: Any) -> RecordableFunction:
        function: RecordableFunction = self.ids_to_funcs[function_id].model
        return function

    # Calls

    def add_function(
        self, model: RecordableFunction, inputs: list[Any], static_input_idxs: Sequence[int], *others: Any
    ) -> tuple[Any, Any]:
        """Add a function as stock does."""
        _, _, _, placeholders, *_ = others
        model.turn, model.callers = self.turn, self.streams.callers
        # Note [Geometry at an unchanged address]. Of a backward's inputs only the forward's own inputs are compared:
        # the program cannot reach the others.
        compared = [
            index
            for index in static_input_idxs
            if model.direction != "backward" or placeholders[index].name.startswith("primals")
        ]
        if model.geometry is None or not model.geometry.is_of(inputs, compared):
            model.geometry = FixedGeometry(inputs, compared)
        added: tuple[Any, Any] = self._add_function(model, inputs, static_input_idxs, *others)
        return added

    def run(self, new_inputs: list[Any], function_id: Any) -> Any:
        """Run a function as stock does. Note [Kept results]. Calls on the fast path do not come here."""
        if hook.at_rest_now:
            return self.ids_to_funcs[function_id].model(new_inputs)
        inside = inside_another(self.turn)  # Note [Order of locks] in `calls.turns`
        with contextlib.nullcontext() if inside else self.turn:
            if self._runs_function:  # Note [Functions inside of functions]
                return self._function(function_id)(new_inputs)
            if inside:
                return self.run_without_graph(new_inputs, function_id, reasons.INSIDE_FUNCTION)
            if self.graph is None:  # another thread shut it down meanwhile
                return self.run_without_graph(new_inputs, function_id, reasons.RESET)
            if self.running and new_inputs is self._inputs:  # stock calls this again after it ended an iteration
                return super().run(new_inputs, function_id)
            if self.running:  # stock's code runs a function without a graph. Note [Functions inside of functions]
                return self._function(function_id)(new_inputs)
            return self._run_in_turn(new_inputs, function_id)

    def _run_in_turn(self, new_inputs: list[Any], function_id: Any) -> Any:
        """Run a call of the program."""
        function = self._function(function_id)
        self.streams.enter(function.direction == "backward", self.current_node)
        reason = self._against_a_graph(function, new_inputs)
        retired = function.without_graph is not None and not function.is_retired
        if retired and not self.streams.inside_capture:  # freeing graphs would end the capture
            function.is_retired = True
            self._free_unused_graphs()
        if reason is not None:
            return self.run_without_graph(new_inputs, function_id, reason)
        fixed = self._parameters(function_id, new_inputs)
        self.running, self._inputs = True, new_inputs
        self._checkpoint_due, self._captured = False, None
        refused: NotLaunched | None = None
        try:
            outputs = super().run(new_inputs, function_id)
        except NotLaunched as error:
            refused = NotLaunched(error.node, error.reason, of_no_use=error.of_no_use)  # the error holds this frame
        finally:
            self.running, self._inputs = False, None
        if refused is not None:
            return self.not_launched(refused, new_inputs, function_id)
        if self._captured is None:  # stock's code ran it without a graph
            too_often = self.exceed_rerecord_limit(self._get_node_id(), function_id)
            function.ran_without_graph(reasons.RECORDED_TOO_OFTEN if too_often else reasons.WRITES_INPUT)
        if not self._captured:
            self.mark_uncaptured(outputs, fixed)
            return outputs
        if function.direction == "forward":
            for storage in _storages(outputs) if self._marks else ():  # some are the caller's inputs
                self._marks.pop(storage._cdata, None)
        node = self.current_node
        return kept_copied(node, outputs) if function.kept_outputs and isinstance(node, EncoreNode) else outputs

    def execute_node(self, node: Any, new_inputs: list[Any]) -> Any:
        """Replay a node as stock does; the next call like this one may take the fast path."""
        with self._running_a_function():  # its session may capture it once more
            outputs = super().execute_node(node, new_inputs)
        node.expect_again()
        return outputs

    def _against_a_graph(self, function: RecordableFunction, inputs: Sequence[Any]) -> str | None:
        """Return why a call runs without a graph; None if a graph may be replayed or recorded."""
        self._begins = self.current_node is not None and not self.streams.inside_capture and self._at_boundary()
        if self._begins:
            self._check_held_results()
        if function.without_graph is not None or self.streams.inside_capture:
            return function.without_graph or reasons.INSIDE_CAPTURE
        if function.geometry is not None and not function.geometry.holds(inputs):
            function.geometry.require_dtypes(inputs)
            return reasons.OTHER_GEOMETRY
        if self.held_in_generation is not None:
            return reasons.KEPT
        if function.direction == "backward" and self.has_uncaptured_forward(inputs):
            return reasons.FORWARD_UNCAPTURED
        return None

    def run_without_graph(self, inputs: list[Any], function_id: Any, reason: str) -> Any:
        """Run a call without a graph, on inputs at any addresses."""
        function = self._function(function_id)
        function.ran_without_graph(reason)
        self.mode = self.id_to_mode[function_id]
        fixed = self._parameters(function_id, inputs)
        outputs = function(inputs)
        self.mark_uncaptured(outputs, fixed)
        if function.direction != "inference":  # as in stock's `run`: a forward is pending after its call
            self.running_forwards_with_pending_backwards = function.direction == "forward"
        return outputs

    def not_launched(self, refused: NotLaunched, inputs: list[Any], function_id: Any) -> Any:
        """Run a call without a graph because the chosen recording could not be replayed."""
        refused.node.give_back_inputs(inputs)
        if refused.of_no_use:
            refused.node.function.not_followed = refused.reason
            self._drop(refused.node)
        return self.run_without_graph(inputs, function_id, refused.reason)

    def _parameters(self, function_id: Any, inputs: Sequence[Any]) -> list[Any] | None:
        """Return the parameters among a forward's inputs; None for other functions, whose results are not marked.

        Inputs that it writes are left out: they may be results of a graph, which must not be referenced in the call.
        """
        function = self._function(function_id)
        if function.direction != "forward":
            return None
        fixed = {*self.ids_to_funcs[function_id].static_input_idxs, *function.ordinary_inputs}
        return [inputs[index] for index in fixed.difference(function.written_inputs)]

    def mark_uncaptured(self, outputs: Iterable[Any], fixed: Iterable[Any] | None) -> None:
        """Mark the results of a forward that ran without a graph; see `_parameters`. Note [Uncaptured forwards]."""
        if fixed is None:
            return
        for key, mark in self._marks.copy().items():  # another thread may mark what a function called inside returned
            if mark.expired() and self._marks.get(key) is mark:
                self._marks.pop(key, None)
        in_graphs = set(self._live_results().values())
        lasting = {storage._cdata for storage in _storages(fixed)}
        for storage in _storages(outputs):
            if storage._cdata not in lasting and storage.data_ptr() not in in_graphs:
                # A weak reference keeps the key from being used for another storage.
                self._marks[storage._cdata] = trees.StorageWeakRef(storage)

    def has_uncaptured_forward(self, inputs: Iterable[Any]) -> bool:
        """Return whether one of a backward's inputs was returned by a forward without a graph."""
        return bool(self._marks) and any(storage._cdata in self._marks for storage in _storages(inputs))

    # Recording

    def run_eager(self, new_inputs: list[Any], function_id: Any) -> Any:
        """Run a function without a graph as stock does, which warms up in the pool. See the notes on warm-ups."""
        function = self._function(function_id)
        run, thread = function.run, threading.get_ident()
        found: list[Any] = []  # empty before the function begins; then one element: None, or its results

        def warm_up(inputs: list[Any]) -> Any:
            if threading.get_ident() != thread:  # a call past the manager
                return run(inputs)
            found.append(None)
            found[0] = run(inputs)
            return found[0]

        function.run = warm_up
        try:
            with self._results_alive(new_inputs, keeps_others=True), self._running_a_function():
                return super().run_eager(new_inputs, function_id)
        except BaseException as error:
            self.warmed_up_functions.discard(function_id)
            if not isinstance(error, Exception) or found == [None]:
                node = self.current_node
                if isinstance(node, trees.CUDAWarmupNode) and len(node.tensor_weakrefs) != len(node.stack_traces):
                    node.stack_traces = []
                    node.outputs_weakrefs.clear()
                    node.tensor_weakrefs.clear()
                raise
            if several_ranks(function.code()):  # Note [Functions of several ranks]
                raise
            failure = f"it could not be warmed up in a graph's memory: {one_line(error)}"
            error.__traceback__ = None  # its frames hold results
        finally:
            function.run = run
        self.leave_pool()
        if found:
            function.without_graph = failure
        self._note_uncaptured(function, failure)
        return found[0] if found else function(new_inputs)

    @contextlib.contextmanager
    def _running_a_function(self) -> Iterator[None]:
        """Mark the block as warming up, recording or replaying a function. Note [Functions inside of functions]."""
        before, self._runs_function = self._runs_function, True
        self._captured = True
        try:
            yield
        finally:
            self._runs_function = before

    def record_function(self, new_inputs: list[Any], function_id: Any) -> Any:
        """Record a function as stock does. An input with a third address becomes an ordinary one; see `moved_inputs`.

        Note [A recording that fails]. Without a graph where seeds of attention lie on the host: see `readable_seeds`.
        """
        function = self._function(function_id)
        made = self._results_among(new_inputs)
        fixed = {*self.ids_to_funcs[function_id].static_input_idxs, *made}  # stock copies the others in a recording
        refuse_derivatives(value for index, value in enumerate(new_inputs) if index not in fixed)
        refused: str | None = reasons.FORWARD_UNCAPTURED
        if not any_on_host(new_inputs, function.code().seeds):
            refused = self._not_recorded_again(function_id, new_inputs)
        if refused is not None:
            self._checkpoint_due = False
            self._note_uncaptured(function, refused)
            return function(new_inputs)
        if in_a_process_group() and (function.code().collective or function.code().opaque):
            free_before_process_groups_end()
        with self._results_alive(new_inputs):
            return self._record_after_results(made, new_inputs, function_id)

    def _record_after_results(self, made: Sequence[int], new_inputs: list[Any], function_id: Any) -> Any:
        """Record a function, or run it without a graph if that fails. `made`: the inputs that are results."""
        function, before = self._function(function_id), self.current_node
        inputs = list(new_inputs)
        for index in made:  # not referenced: results must die during the recording, as they do in replays
            inputs[index] = before.borrowed(inputs[index])
        try:
            with self._running_a_function():
                if len(self.streams.callers) > 1:  # a thread's handle of cuBLAS allocates memory: not in the capture
                    with torch.cuda.stream(self.stream):
                        torch.cuda.current_blas_handle()
                outputs = self._record_function(new_inputs, function_id)
            self.current_node.expect_again()
            return outputs
        except BaseException as error:
            if self.current_node is not before:  # the call has run; a handler of signals raised this
                self.current_node.recording_outputs = None
                raise
            in_cusolver = failed_in_cusolver(error)
            if several_ranks(function.code()) or not isinstance(error, Exception):
                self._end_failed_capture(in_cusolver)
                raise  # Note [Functions of several ranks]
            reason = f"it could not be recorded: {one_line(error)}"
            function.failed_recordings += 1
            if len(self.streams.callers) < 2 or function.failed_recordings >= FAILURES_OF_THREADS:
                function.without_graph = reason
            error.__traceback__ = None  # its frames hold tensors of the failed capture
        self._end_failed_capture(in_cusolver)
        for index in set(made).difference(self.ids_to_funcs[function_id].mutated_input_idxs):  # those stay in place
            inputs[index] = torch_internals.clone_preserve_strides(inputs[index])
        self._note_uncaptured(function, reason)
        return function(inputs)

    def _results_among(self, inputs: Sequence[Any]) -> list[int]:
        """Return which inputs of the next call are results of graphs of this iteration."""
        made = set(self._live_results().values())
        return [
            index
            for index, value in enumerate(inputs)
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in made
        ]

    def _end_failed_capture(self, in_cusolver: bool) -> None:
        torch.cuda.synchronize()
        end_failed_capture(self.device_index, self.cuda_graphs_thread_pool, self.stream, in_cusolver=in_cusolver)

    def _note_uncaptured(self, function: RecordableFunction, reason: str) -> None:
        """Note that a call that would be warmed up or recorded runs without a graph."""
        function.ran_without_graph(reason)
        self._captured = False

    def _not_recorded_again(self, function_id: Any, inputs: list[Any]) -> str | None:
        """Return why a call runs without a graph instead of being recorded; None where it may be recorded.

        Inputs that came to a third address become ordinary inputs of the next recording if they can be copied.
        """
        function, wrapped = self._function(function_id), self.ids_to_funcs[function_id]
        by_call = moved_inputs.by_call(function)
        recorded = by_call[moved_inputs.calls_on_path(self.current_node, function) + 1]
        if ordinary := moved_inputs.can_be_copied(inputs, wrapped, recorded, self.cuda_graphs_thread_pool):
            static = [index for index in wrapped.static_input_idxs if index not in ordinary]
            wrapped = self.ids_to_funcs[function_id] = dataclasses.replace(wrapped, static_input_idxs=static)
            function.ordinary_inputs |= ordinary
        if (operator := function.code().uncapturable) is not None:
            function.without_graph = f"it calls {operator}, which cannot be captured"
            return function.without_graph
        if several_ranks(function.code()):  # Note [Functions of several ranks]
            return None
        siblings = self._recorded_after(self.current_node, function_id)
        functions = [one.model for one in list(self.ids_to_funcs.values())]
        copied_out = function.direction == "backward" and any(
            one.kept_outputs and one.direction == "forward" for one in functions
        )
        reason = moved_inputs.against_one_more_recording(inputs, wrapped, recorded, siblings, copied_out)
        misfits = function.misfits_in_a_row() if reason == reasons.INPUT_KEEPS_MOVING else 0
        if reason is not None and (not misfits or misfits > moved_inputs.MOST_MISFITS * max(by_call)):
            function.without_graph = reason
        return reason

    # Recordings

    def nodes(self) -> Iterator[EncoreNode]:
        """Yield all recordings. Other threads may record meanwhile."""
        roots = self.roots or {}
        return with_followers([one for recorded in list(roots.values()) for one in recorded])

    def _recorded_after(self, parent: EncoreNode | None, function_id: Any) -> list[EncoreNode]:
        """Return the tree's own list of a function's recordings after `parent`, or of its roots (None)."""
        following: dict[Any, list[EncoreNode]] = self.roots if parent is None else parent.children
        return following.get(function_id, [])

    def _drop(self, node: EncoreNode) -> None:
        """Remove a recording and its descendants from the tree. None of their results is live."""
        siblings = self._recorded_after(node.parent, node.wrapped_function.id)
        siblings[:] = [one for one in siblings if one is not node]
        if self.current_node is node:
            self.current_node = node.parent
        self._release(with_followers([node]))

    def _release(self, nodes: Iterable[EncoreNode]) -> None:
        """Release what these recordings hold in addition to their graphs."""
        released = list(nodes)
        self._still_read(released)
        for node in released:
            node.remove_node_cached_tensors()
            node.release()

    def _still_read(self, nodes: Iterable[EncoreNode]) -> None:
        """Keep the memory of recordings that are about to be freed until their running launches end."""
        stream = self.streams.before()
        if stream is not None:
            for node in nodes:
                if node.session is not None:
                    node.session.still_read(stream)

    # Note [Kept results]

    def _at_boundary(self, *arguments: Any) -> bool:
        """Return whether this call begins an iteration that may overwrite results of the previous iteration."""
        return bool(super().can_start_new_generation(*arguments))

    def can_start_new_generation(self, *arguments: Any) -> bool:
        """Return what stock does, but False while results of the previous iteration are live.

        Other threads count generations without this manager's lock. One that begins after this call was checked for
        live results is seen by the next call.
        """
        return self._begins and self.held_in_generation is None and self._at_boundary(*arguments)

    def _check_held_results(self) -> None:
        generation = self.get_curr_generation()
        if not any(True for _ in self.current_node.path_live_weakrefs()):
            self.held_in_generation = None
            self._held_iterations = 0
            return
        if self.held_in_generation != generation:
            self.held_in_generation = generation
            self._held_iterations += 1
            for node in self.current_node._path_from_root:
                live = [place for place, reference in enumerate(node.outputs_weakrefs) if trees.is_live(reference)]
                node.wrapped_function.model.kept_outputs.update(live)
        patience = PATIENCE if any(self.roots.values()) else 0  # nothing is recorded yet, so nothing is lost
        if len(self.streams.callers) > 1:
            patience = PATIENCE_OF_THREADS
        if self._held_iterations > patience:
            self.leave_pool()

    # The pool

    def _free_unused_graphs(self) -> None:
        """Free the graphs and their pool once all functions that have graphs run without them."""
        if not any(self.roots.values()) or len(self.streams.callers) > 1:
            return
        if all(node.function.without_graph is not None for node in self.nodes()):
            self.leave_pool()

    def _let_held_results_own_their_memory(self) -> None:
        """Give live results ownership of their memory, because the pool is about to be freed."""
        node = self.current_node
        replayed = isinstance(node, EncoreNode) and self.path_state is trees.ExecutionState.EXECUTION
        if replayed and any(True for _ in node.path_live_weakrefs()):
            self._checkpoint_due = True
            with self._results_alive():
                pass

    def outlived(self) -> None:
        """Callback: no function needs the manager any more. Note [Results that outlive their functions].

        The thread that releases the last function calls it. A forked child process must not use the device.
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
        """Leave the memory pool to its live results, and begin a new one. Everything is recorded again."""
        self._let_held_results_own_their_memory()
        self._release(self.nodes())
        self.streams.left.clear()
        self.current_node = None
        self.roots = defaultdict(list)
        forget_places(self)
        self.held_in_generation = None
        self._held_iterations = 0
        self._pool = Pool(self.device_index)  # this object keeps it alive, not a capture
        self.cuda_graphs_thread_pool = self._pool.id
        self.graph = torch.cuda.CUDAGraph()  # stock's graph would keep the first pool; this one is never captured
        # Expandable segments are unmapped without waiting for replays. Synchronizing fails while another thread
        # captures; the call must not fail for that, and the memory is freed with the next memory that is freed.
        with contextlib.suppress(RuntimeError):
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(self.device_index)
                give_back()

    def apply_checkpoint_execution_state_in_allocator(self) -> None:
        """Delay stock's checkpoint until something is really allocated in the pool.

        The checkpoint makes live results own their memory, and stock supports that once on a path: after it, a path
        that continues with replays could never continue with a recording.
        """
        self._checkpoint_due = True

    def _live_results(self) -> dict[int, int]:
        """Return the addresses of this iteration's live results, by storage."""
        node = self.current_node  # another thread may change it where this call is inside of a function
        return {one.ref.cdata: one.data_ptr() for one in (node.path_live_weakrefs() if node is not None else ())}

    @contextlib.contextmanager
    def _results_alive(self, inputs: Iterable[Any] = (), *, keeps_others: bool = False) -> Iterator[None]:
        """Apply the checkpoint that is due, and keep live results alive meanwhile and in the block.

        Those among the `inputs` are not kept. Note [Results that die meanwhile].
        `keeps_others`: keep the other inputs. Note [Memory that a warm-up reads].
        """
        node = self.current_node
        if isinstance(node, EncoreNode):
            node.remove_path_cached_tensors()  # these are live only if the program references them
        results = self._live_results()
        given = {storage._cdata: storage for storage in _storages(inputs)}
        held = list(map(torch_internals.storage_of_weak, results.keys() - given))
        held += [storage for cdata, storage in given.items() if keeps_others and cdata not in results]
        del given
        try:
            if self._checkpoint_due:
                self._checkpoint_due = False
                super().apply_checkpoint_execution_state_in_allocator()
                self.path_state = trees.ExecutionState.RECORDING  # also if the call fails: it is not applied again
            yield
        finally:
            # Stock waits for its stream only after a warm-up that succeeds, but the program may continue after a
            # failure. If the device is lost, this wait fails too, and the first error must reach the program.
            with contextlib.suppress(RuntimeError):
                if keeps_others:
                    torch.cuda.current_stream(self.device_index).wait_stream(self.stream)
            held.clear()

    def shutdown(self) -> None:
        """Shut down as stock does, and release what the nodes hold in addition. Nothing can run afterwards.

        This waits for the device: a running replay on another stream may read what is freed. Live results stay valid.
        """
        with self.turn:
            torch.cuda.synchronize(self.device_index)
            self._let_held_results_own_their_memory()
            nodes = list(self.nodes())
            super().shutdown()
            for node in nodes:
                node.release()


def _storages(values: Iterable[Any]) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors among these values."""
    return [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]


def with_followers(nodes: Iterable[EncoreNode]) -> Iterator[EncoreNode]:
    """Yield these recordings and their descendants in the tree. Other threads may record meanwhile."""
    left = list(nodes)[::-1]
    while left:
        found = left.pop()
        yield found
        left += [one for recorded in list(found.children.values()) for one in recorded]
