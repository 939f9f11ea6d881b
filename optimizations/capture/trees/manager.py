"""Managers of Encore's recordings: CUDAGraph Trees that overwrite no result somebody holds, and that outlive failures.

`run` is stock's, with a question before and an answer after it.

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

Note [Uncaptured forwards]. A forward that ran without a graph has its saved tensors in ordinary memory, at new
addresses each time. A backward takes saved tensors for inputs at fixed addresses, so one that gets none from the pool
is run without a graph as well.

Note [A recording that fails]. A capture runs nothing on the device, so nothing has been done when it fails, and its
inputs are still what they were. The function runs on them without a graph, and is never recorded again. Results of
earlier graphs among the inputs may lie in memory that the failed capture gave back; they are copied out at once.

Note [A warm-up that fails]. Memory is short, an index is out of range, the program catches the error and goes on. Stock
keeps a warm-up without results for a call that should have some, and raises in every later call. Here it counts as one
of nothing, and the function is warmed up again.

Note [Results outside of the pool]. Before and after a warm-up, stock checks the pool: it must hold the results of
functions and nothing else. Stock raises if a function returned memory from elsewhere, or keeps memory of the pool. Its
results are right all the same, so the caller gets them. The function runs without a graph from then on, and the pool is
left to what lies in it. If the check before the warm-up failed, another function was the cause.

Note [Threads]. A compiled function may be called from any thread, and its manager belongs to the one that first did.
So calls take turns. A thread that never used CUDA has no current context, which driver calls need. Work on another
stream than the last call's waits for what is enqueued there, for both use the same memory.

Note [Captures of the program's own]. A graph can be launched on a stream that captures no more than it can be recorded
there. Where the program captures on another stream than the one it calls on, as PyTorch's `torch.cuda.graph` does, this
is noticed with the change of streams, and functions run without their graphs inside.

Note [Functions inside of functions]. An operator of the program's own may call a compiled function. While such an
operator is warmed up or recorded, as part of another function, the inner function is part of that one too: it runs as
it is, and the outer graph holds its kernels.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.inner_graphs import resting
from optimizations.capture.trees.alike import tell_ranks
from optimizations.capture.trees.containers import shut_down, thread_containers
from optimizations.capture.trees.endings import free_before_process_groups_end, in_a_process_group
from optimizations.capture.trees.function import RecordableFunction, WarmUp, forget_recordings
from optimizations.capture.trees.lean import MOST_KEPT, SteadyCall, steadily, steady_call
from optimizations.capture.trees.node import EncoreNode, NotFollowed, NotLaunched
from optimizations.captured.pools import Pool, claim, end_failed_capture, give_back
from optimizations.recording.fixed_inputs import Answer
from optimizations.replay.streams import make_context_current, wait_for_stream
from optimizations.torch_internals.rebind import with_globals

trees = torch_internals.cudagraph_trees
CUDAGraphTreeManager: Any = trees.CUDAGraphTreeManager
TreeManagerContainer: Any = trees.TreeManagerContainer

PATIENCE = 4
"""Iterations in a row that run without graphs because results are held, before a new pool is begun."""

PATIENCE_OF_THREADS = 32
"""The same where several threads call."""

KEPT = "the program holds a result that the graph would overwrite"
FORWARD_UNCAPTURED = "its forward ran without a graph"

INSIDE_CAPTURE = "it was called inside of a capture of the program's own"

RECORDINGS_BEFORE_FOLLOWING = 2
"""As many recordings differ in nothing but fixed addresses before these are patched instead."""

MANY_COPIES = 4
"""As many results are copied by one call, with a kernel for many at a time, instead of one by one."""

RECORDED_IN_VAIN = 512
"""Recordings in a row of which none was ever replayed, before a function is left without a graph: more than the calls
of an iteration. A forward without a backward, whose last result is held in each call, would be recorded in each."""

BACKWARDS_RECORDED_IN_VAIN = 32
"""The same for a backward where results of forwards are copied out: what a forward saved then lies elsewhere each time.
"""

MOST_RECORDINGS = 8
"""Recordings of one function at one place for sets of addresses that come back; see `replay.swaps`."""


_exiting = threading.Event()
"""Set when the interpreter begins to exit: then nobody reads a result any more."""
atexit.register(_exiting.set)


def container(device_index: int) -> EncoreContainer:
    """The container of this thread (of the thread whose backward this one runs) for a CUDA device."""
    containers = thread_containers()
    with containers.lock:
        if device_index not in containers.by_device:
            containers.by_device[device_index] = EncoreContainer(device_index)
        found: EncoreContainer = containers.by_device[device_index]
        return found


class EncoreManager(CUDAGraphTreeManager):
    """CUDAGraph Trees whose functions are `RecordableFunction`s and whose nodes are `EncoreNode`s."""

    current_gen: int
    current_node: Any
    roots: dict[Any, list[EncoreNode]]
    running_forwards_with_pending_backwards: bool

    _add_function = with_globals(CUDAGraphTreeManager.add_function, get_container=container)
    _record_function = with_globals(CUDAGraphTreeManager.record_function, CUDAGraphNode=EncoreNode)

    def __init__(self, device_index: int) -> None:
        self._owner = os.getpid()
        self.turn = threading.RLock()
        self.entered = threading.local()
        self.last_stream: int | None = None
        self._stream_before_capture: int | None = None
        self.inside_capture = False
        self.held_in_generation: int | None = None
        self._held_iterations = 0
        self.uncaptured_forwards = 0
        self.running = False
        self._runs_function = False
        self._checkpoint_due = False
        self._forwards_are_copied_out = False
        self._callers: set[int] = set()
        self._pool: Pool | None = None
        self._steady: defaultdict[Any, list[SteadyCall]] = defaultdict(list)
        super().__init__(device_index)
        claim(self.cuda_graphs_thread_pool)

    # Calls

    def add_function(self, model: RecordableFunction, *arguments: Any, **keywords: Any) -> tuple[Any, Any]:
        """As stock's; calls are steady where they can be."""
        model.turn = self.turn
        full, outputs = self._add_function(model, *arguments, **keywords)
        return steadily(self, full), outputs

    def run(self, new_inputs: list[Any], function_id: Any) -> Any:
        """As stock's. Notes [Kept results], [Uncaptured forwards], [Threads]. Steady calls pass it by: see `lean`."""
        if resting():
            return self.ids_to_funcs[function_id].model(new_inputs)
        with self.turn:
            if self._runs_function:  # Note [Functions inside of functions]
                return self._function(function_id)(new_inputs)
            if self.running:  # stock calls itself once more after it ended an iteration
                return super().run(new_inputs, function_id)
            self.enter(function_id)
            function = self._function(function_id)
            reason = self._against_a_graph(function_id, function, new_inputs)
            if function.retiring:
                function.retiring = False
                self._free_what_is_retired()
            if reason is not None:
                return self.run_without_graph(new_inputs, function_id, reason)
            returned = {place: new_inputs[index] for place, index in function.returned_inputs.items()}
            self.running = True
            self._checkpoint_due = False
            refused: tuple[EncoreNode, str, bool] | None = None  # not the error, which would hold this frame
            try:
                outputs = super().run(new_inputs, function_id)
            except NotLaunched as error:
                refused = error.node, error.reason, isinstance(error, NotFollowed)
            finally:
                self.running = False
            if refused is not None:
                return self.not_launched(*refused, new_inputs, function_id)
            if returned:
                outputs = _with_inputs(outputs, returned)
            return self.kept_copied(function, outputs) if function.kept_outputs else outputs

    def execute_node(self, node: Any, new_inputs: list[Any]) -> Any:
        """As stock's; the next call like this one may be a steady one."""
        with self._running_a_function():  # its session may capture it once more
            outputs = super().execute_node(node, new_inputs)
        self._expect_steady_calls(node)
        return outputs

    def steady_calls(self, function_id: Any) -> list[SteadyCall]:
        """What there is for a function; always the same list."""
        return self._steady[function_id]

    def _expect_steady_calls(self, node: EncoreNode) -> None:
        function_id = node.wrapped_function.id
        if not node.function.lean:
            return
        found = self._steady[function_id]
        calls = [call for call in found if call.valid]
        if not any(call.node is node for call in calls):
            made = steady_call(node, self.id_to_mode[function_id], self.id_to_compile_id[function_id])
            calls = [*([] if made is None else [made]), *calls][:MOST_KEPT]
        found[:] = calls

    def _forget_steady_calls(self) -> None:
        for calls in self._steady.values():
            calls.clear()

    def _function(self, function_id: Any) -> RecordableFunction:
        function: RecordableFunction = self.ids_to_funcs[function_id].model
        return function

    def _against_a_graph(self, function_id: Any, function: RecordableFunction, inputs: Sequence[Any]) -> str | None:
        if self.current_node is not None and self._at_boundary() and not self.inside_capture:
            self._look_for_held_results()
        if function.without_graph is not None or self.inside_capture:
            is_backward = self.id_to_mode[function_id] is trees.CompilationMode.BACKWARD
            if is_backward and self.uncaptured_forwards and not self._any_from_the_pool(inputs):
                self.uncaptured_forwards -= 1
            return function.without_graph or INSIDE_CAPTURE
        if self.held_in_generation is not None:
            return KEPT
        if self.uncaptured_forwards and self.id_to_mode[function_id] is trees.CompilationMode.BACKWARD:
            self.uncaptured_forwards -= 1
            if not self._any_from_the_pool(inputs):
                return FORWARD_UNCAPTURED
        return None

    def run_without_graph(self, inputs: list[Any], function_id: Any, reason: str) -> Any:
        """Serve a call without a graph, on inputs that need not lie where a graph has them."""
        function = self._function(function_id)
        function.ran_without_graph(reason)
        mode = self.mode = self.id_to_mode[function_id]
        outputs = function(inputs)
        # As `run` has it: forwards are pending after their call.
        if mode is trees.CompilationMode.FORWARD:
            self.running_forwards_with_pending_backwards = True
            self.uncaptured_forwards += 1
        elif mode is trees.CompilationMode.BACKWARD:
            self.running_forwards_with_pending_backwards = False
        return outputs

    def not_launched(
        self, node: EncoreNode, reason: str, not_followed: bool, inputs: list[Any], function_id: Any
    ) -> Any:
        """Serve a call without the graph of `node`, which was chosen for it. See `node.NotLaunched`."""
        node.give_back_inputs(inputs)
        if not_followed:
            node.function.not_followed = reason
            self._drop(node)
        return self.run_without_graph(inputs, function_id, reason)

    def _drop(self, node: EncoreNode) -> None:
        """Take a recording out of the tree, with all that follow it. Nobody holds a result of theirs."""
        siblings = (self.roots if node.parent is None else node.parent.children)[node.wrapped_function.id]
        siblings[:] = [one for one in siblings if one is not node]
        if self.current_node is node:
            self.current_node = node.parent
        for one in below(node):
            one.remove_node_cached_tensors()
            one.release()
        self._forget_steady_calls()

    def _any_from_the_pool(self, inputs: Sequence[Any]) -> bool:
        node = self.current_node
        if node is None:
            return False
        held = {reference.data_ptr() for reference in node.path_live_weakrefs()}
        return any(isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in held for value in inputs)

    # Note [Kept results]

    def _at_boundary(self) -> bool:
        """Whether this call begins an iteration that may overwrite the results of the one before."""
        return bool(super().can_start_new_generation())

    def can_start_new_generation(self) -> bool:
        """As stock's; not while results of the one before are held."""
        return self.held_in_generation is None and self._at_boundary()

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

    def _mark_kept(self, addresses: set[int]) -> None:
        for node in self.current_node._path_from_root:
            function: RecordableFunction = node.wrapped_function.model
            for place, reference in enumerate(node.outputs_weakrefs):
                if reference is not None and reference.data_ptr() in addresses and trees.is_live(reference):
                    function.kept_outputs.add(place)
                    self._forwards_are_copied_out |= function.direction == "forward"

    def kept_copied(self, function: RecordableFunction, outputs: Any) -> Any:
        """The outputs, those that the program keeps copied out of the pool; outputs that share memory share a copy."""
        node = self.current_node
        if node is None:
            return outputs
        handed = list(outputs)
        del outputs
        if isinstance(node, EncoreNode) and node.function is function and function.kept_outputs <= node.lone_outputs:
            places = sorted(function.kept_outputs)
            for place, copied in zip(places, _copies([handed[place] for place in places]), strict=True):
                handed[place] = copied
                function.kept_bytes += copied.nbytes
            function.kept_copies += len(places)
            return handed
        pool = {
            reference.data_ptr()
            for one in node._path_from_root
            for reference in one.outputs_weakrefs
            if reference is not None
        }
        copies: dict[int, torch.UntypedStorage] = {}
        for place in function.kept_outputs:
            value = handed[place] if place < len(handed) else None
            if not isinstance(value, torch.Tensor):
                continue
            address = value.untyped_storage().data_ptr()
            if address in pool and address not in copies:
                copies[address] = value.untyped_storage().clone()
                function.kept_copies += 1
                function.kept_bytes += copies[address].nbytes()
        for place, value in enumerate(handed):
            if isinstance(value, torch.Tensor) and (address := value.untyped_storage().data_ptr()) in copies:
                handed[place] = over(copies[address], value, int(value.storage_offset()))
        return handed

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
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            warnings.warn(
                f"Results of CUDA graphs that are gone may be overwritten; {reason}. This is a defect of Encore.",
                stacklevel=2,
            )

    def leave_pool(self) -> None:
        """Leave the memory pool to those who hold results in it, and begin a new one. Everything is recorded again."""
        self._let_held_results_own_their_memory()
        for node in list(self.nodes()):
            node.remove_node_cached_tensors()
            node.release()
        self._forget_steady_calls()
        self.current_node = None
        self.roots = defaultdict(list)
        self.non_cudagraph_managed_mutation_hint.clear()
        self.num_rerecord.clear()
        self.held_in_generation = None
        self._held_iterations = 0
        self._pool = Pool(self.device_index)  # kept by this, not by a capture
        self.cuda_graphs_thread_pool = self._pool.id
        self.graph = torch.cuda.CUDAGraph()  # stock's keeps its first pool, and nothing is ever captured in this one
        give_back()

    # Recording

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

    def run_eager(self, new_inputs: list[Any], function_id: Any) -> Any:
        """As stock's, which warms up in the pool. The notes on warm-ups."""
        self._apply_due_checkpoint()
        function = self._function(function_id)
        warm_up = function.run = WarmUp(function.run)
        try:
            with self._running_a_function():
                return super().run_eager(new_inputs, function_id)
        except BaseException as error:
            self.warmed_up_functions.discard(function_id)
            if not isinstance(error, Exception) or (warm_up.began and warm_up.results is None):
                node = self.current_node
                if isinstance(node, trees.CUDAWarmupNode) and len(node.tensor_weakrefs) != len(node.stack_traces):
                    node.stack_traces = []
                    node.outputs_weakrefs.clear()
                    node.tensor_weakrefs.clear()
                raise
            failure = f"it could not be warmed up in a graph's memory: {type(error).__name__}: {error}".splitlines()[0]
            error.__traceback__ = None  # its frames hold results
        finally:
            function.run = warm_up.run
        self.leave_pool()
        if warm_up.began:
            function.without_graph = failure
        tell_ranks(function)
        self._note_uncaptured(function_id, failure)
        return warm_up.results if warm_up.began else function(new_inputs)

    @contextlib.contextmanager
    def _running_a_function(self) -> Iterator[None]:
        """Note [Functions inside of functions]."""
        before, self._runs_function = self._runs_function, True
        try:
            yield
        finally:
            self._runs_function = before

    def record_function(self, new_inputs: list[Any], function_id: Any) -> Any:
        """As stock's. A parameter that moved for the third time is patched instead; see `recording.fixed_inputs`.

        Note [A recording that fails].
        """
        with self._running_a_function():
            followed = self._followed(new_inputs, function_id)
        if followed is not None:
            self._checkpoint_due = False
            return followed[0]
        function = self._function(function_id)
        vain = self._against_one_more_recording(function)
        if vain is not None:
            self._checkpoint_due = False
            function.without_graph = vain
            tell_ranks(function)
            self._note_uncaptured(function_id, vain)
            return function(new_inputs)
        replayed = self._checkpoint_due
        self._histories_forgotten()
        self._apply_due_checkpoint()
        function.callers = self._callers
        if in_a_process_group() and (function.code().collective or function.code().opaque):
            free_before_process_groups_end(_free_all)
        inputs = self._kept_for_a_failure(new_inputs)
        try:
            with self._running_a_function():
                outputs = self._record_function(new_inputs, function_id)
            tell_ranks(function)
            self._expect_steady_calls(self.current_node)
            self._patched_last(function_id, self.current_node.parent)
            function.note_returned_inputs(self.current_node.returned_inputs)
            returned = {place: inputs[index][0] for place, index in function.returned_inputs.items()}
            return _with_inputs(outputs, returned) if returned else outputs
        except Exception as error:
            function.without_graph = f"it could not be recorded: {type(error).__name__}: {error}".splitlines()[0]
            error.__traceback__ = None  # its frames hold tensors of the failed capture
        tell_ranks(function)
        if replayed:
            self.path_state = trees.ExecutionState.RECORDING  # the allocator knows what is live
        torch.cuda.synchronize()
        end_failed_capture(self.device_index, self.cuda_graphs_thread_pool, self.stream)
        arguments = [torch_internals.clone_preserve_strides(value) if copied else value for value, copied in inputs]
        inputs.clear()
        self._note_uncaptured(function_id, function.without_graph)
        return function(arguments)

    def _note_uncaptured(self, function_id: Any, reason: str) -> None:
        """A call that was to be warmed up or recorded runs without a graph. Note [Uncaptured forwards]."""
        self._function(function_id).ran_without_graph(reason)
        if self.id_to_mode[function_id] is trees.CompilationMode.FORWARD:
            self.uncaptured_forwards += 1

    def _against_one_more_recording(self, function: RecordableFunction) -> str | None:
        """Why a function whose recordings are never replayed is not recorded again."""
        most = RECORDED_IN_VAIN
        if function.direction == "backward" and self._forwards_are_copied_out:
            most = BACKWARDS_RECORDED_IN_VAIN
        made = function.recorded_in_vain()
        return f"{made} recordings of it were made, and none was replayed" if made >= most else None

    def _kept_for_a_failure(self, inputs: Sequence[Any]) -> list[tuple[Any, bool]]:
        """Inputs to run on if the recording fails, each with whether it must be copied first.

        Results of earlier graphs are not held: they have to die during the recording, as they will in
        replays.
        """
        node = self.current_node
        if node is None:
            return [(value, False) for value in inputs]
        kept: list[tuple[Any, bool]] = []
        for value in inputs:
            if isinstance(value, torch.Tensor) and node._is_cuda_graph_recorded_tensor(value):
                kept.append((node.borrowed(value), True))
            else:
                kept.append((value, False))
        return kept

    def _followed(self, inputs: list[Any], function_id: Any) -> tuple[Any] | None:
        """The results of a call that no recording fits because parameters moved; None where it is to be recorded."""
        siblings = (self.roots if self.current_node is None else self.current_node.children).get(function_id, [])
        moved = [(node, node.fixed_inputs) for node in siblings if node.moved_fixed_input and node.fixed_inputs]
        if len(moved) < RECORDINGS_BEFORE_FOLLOWING:
            return None
        willing = [one for one in moved if one[1].refused is None]
        if not willing:
            return None
        node, fixed_inputs = next((one for one in willing if one[1].following), willing[0])
        function = self._function(function_id)
        if node.prefers_recording(inputs):
            if len(siblings) < MOST_RECORDINGS:
                return None
            assert node.swaps is not None
            node.swaps.close()

        def run(arguments: list[Any]) -> Any:
            function.ran_without_graph("an input at a fixed address moved, and patching it was being tried out")
            if self.id_to_mode[function_id] is trees.CompilationMode.FORWARD:
                self.uncaptured_forwards += 1
            return function(arguments)

        answer, results = fixed_inputs.moved(inputs, run)
        node.look_at_session()
        self._patched_last(function_id, node.parent)
        if answer is Answer.SERVED:
            return (results,)
        if answer is Answer.REPLAY:
            statuses = torch_internals.cudagraph_utils.CheckInvariantStatus
            if node.check_invariants(inputs)[0] is statuses.SUCCESS:
                return (self.execute_node(node, inputs),)
        return None

    def _patched_last(self, function_id: Any, parent: EncoreNode | None) -> None:
        """A recording that was made for a call's addresses comes before one that would have to be patched to them."""
        siblings = (self.roots if parent is None else parent.children)[function_id]
        siblings.sort(key=lambda one: one.fixed_inputs is not None and bool(one.fixed_inputs.following))

    # Note [Threads]

    def enter(self, function_id: Any) -> None:
        if self.id_to_mode[function_id] is not trees.CompilationMode.BACKWARD:  # a backward has a thread of its own
            self._callers.add(threading.get_ident())
        if not hasattr(self.entered, "yes"):
            make_context_current(self.device_index)
            self.entered.yes = True
        stream = torch_internals.current_raw_stream(self.device_index)
        if stream == self.last_stream:
            return
        self.inside_capture = torch.cuda.is_current_stream_capturing()
        if self.inside_capture:  # Note [Captures of the program's own]
            if self.last_stream is not None:
                self._stream_before_capture = self.last_stream
            self.last_stream = None  # each call asks again, until one is outside
            return
        before = self._stream_before_capture if self.last_stream is None else self.last_stream
        if before is not None and before != stream:
            wait_for_stream(before, self.device_index)
        self.last_stream, self._stream_before_capture = stream, None

    def nodes(self) -> Iterator[EncoreNode]:
        """All recordings. Other threads may record meanwhile."""
        roots = self.roots or {}
        for root in [one for recorded in list(roots.values()) for one in recorded]:
            yield from below(root)

    def shutdown(self) -> None:
        """As stock's; frees what the nodes hold in addition to their graphs as well. Nothing can be run any more.

        Waits for the device: a replay under way on another stream reads what is freed here. Results that somebody holds
        stay valid.
        """
        with self.turn:
            torch.cuda.synchronize(self.device_index)
            self._let_held_results_own_their_memory()
            nodes = list(self.nodes())
            self._forget_steady_calls()
            super().shutdown()
            for node in nodes:
                node.release()


def below(node: EncoreNode) -> Iterator[EncoreNode]:
    """A recording and all that follow it."""
    nodes = [node]
    while nodes:
        found = nodes.pop()
        yield found
        for children in list(found.children.values()):
            nodes.extend(children)


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of tensors that fill their memory without gaps: the same values, sizes and strides in memory of their own."""
    if len(tensors) < MANY_COPIES:
        return [tensor.clone() for tensor in tensors]
    made = [torch.empty_like(tensor) for tensor in tensors]
    torch_internals.foreach_copy_(made, tensors)
    return made


def over(storage: torch.UntypedStorage, like: torch.Tensor, offset: int) -> torch.Tensor:
    """A tensor of the shape, strides and dtype of `like` over another storage, `offset` elements from its start."""
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, offset, like.shape, like.stride())


def _with_inputs(outputs: Any, returned: Mapping[int, torch.Tensor]) -> list[Any]:
    """The outputs, with the caller's own tensors where the function returns an input (by place)."""
    handed = list(outputs)
    for place, caller in returned.items():
        output = handed[place]
        # The placeholder begins where its storage does.
        geometry = (output.dtype, output.shape, output.stride(), output.storage_offset())
        if geometry == (caller.dtype, caller.shape, caller.stride(), 0):
            handed[place] = caller
        else:
            start = caller.storage_offset() * caller.element_size() // output.element_size()
            handed[place] = over(caller.untyped_storage(), output, start + output.storage_offset())
    return handed


def _free_all() -> None:
    """Free every graph. Functions record again when called."""
    shut_down()
    forget_recordings()


class EncoreContainer(TreeManagerContainer):
    """Stock's container, which ends its manager when no function needs it any more, with a manager of Encore's."""

    tree_manager: EncoreManager | None

    def _finalize_tree_manager(self) -> None:
        if self.tree_manager is not None:
            self.tree_manager.outlived()
        super()._finalize_tree_manager()

    def get_tree_manager(self) -> EncoreManager:
        with self.lock:
            if self.tree_manager is None:
                self.tree_manager = EncoreManager(self.device_index)
            return self.tree_manager


_record = with_globals(trees.cudagraphify, get_container=container)


def record(
    function: RecordableFunction, inputs: list[Any], *arguments: Any, **keywords: Any
) -> tuple[Callable[[list[Any]], Any] | None, Any]:
    """`torch._inductor.cudagraph_trees.cudagraphify` with the managers of this module. See `function.Record`.

    Not inside of a capture of the program's own: a manager captures when it is made.
    """
    if not resting() and torch.cuda.is_current_stream_capturing():
        function.ran_without_graph(INSIDE_CAPTURE)
        return None, function(inputs)
    found: tuple[Callable[[list[Any]], Any], Any] = _record(function, inputs, *arguments, **keywords)
    return found
