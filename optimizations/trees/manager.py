"""Managers of Encore's recordings: CUDAGraph Trees that overwrite no result somebody holds, and that outlive failures.

`run` is stock's, with a question before and an answer after it. What lies in the pool is the matter of `pool_manager`.

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

Note [Results on other streams]. Where a call comes on another stream than the one before, it waits for that one. But
the program may go on there with results that it holds, and let go of them later: the host then knows of nobody who
reads them, and the device may be behind. So as long as results are alive that were there when a stream was left, each
call waits for that stream, and once more when they are gone.

Note [Calls past the manager]. A function without a graph may read results of graphs on another stream than theirs, and
the next replay writes over them. So its calls follow the streams as all others do (`follow_streams`): they wait for the
graphs before them, and the graphs after them wait for them.

Note [Functions inside of functions]. An operator of the program's own may call a compiled function. While such an
operator is warmed up or recorded, as part of another function, the inner function is part of that one too: it runs as
it is, and the outer graph holds its kernels.

Note [Models that are gone]. Results that nobody holds refer to the backward of the last call, and that to weights. A
model that is let go of may be the last that is called, so this is when they are let go of. But a collection of garbage
lets go of models anywhere, also in the midst of a call: results that are found held would not be a moment later, or a
capture would be under way. So a call that is under way does so at its end. Whoever holds a result at that moment may be
about to go as well (the model itself, or what is collected with it), so the next call looks once more.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.calls.bound import when_a_root_is_gone
from optimizations.calls.streams import make_context_current, stream_of, wait_for_stream
from optimizations.calls.turns import inside_a_function, is_lent
from optimizations.graph.pools import end_failed_capture
from optimizations.one_line import one_line
from optimizations.torch_internals.geometry import FixedGeometry
from optimizations.torch_internals.rebind import with_globals
from optimizations.torch_internals.stock_trees import named_arguments, without_duplicates
from optimizations.trees.alike import tell_ranks
from optimizations.trees.containers import managers, shut_down, thread_containers
from optimizations.trees.endings import free_before_process_groups_end, in_a_process_group
from optimizations.trees.function import RecordableFunction, WarmUp, forget_recordings
from optimizations.trees.inner_graphs import resting
from optimizations.trees.lean import MOST_KEPT, OTHER_GEOMETRY, SteadyCall, steadily, steady_call
from optimizations.trees.moved_inputs import MovedInputsManager
from optimizations.trees.node import EncoreNode, NotFollowed, NotLaunched
from optimizations.trees.readable_seeds import any_on_host
from optimizations.trees.results import with_inputs
from optimizations.trees.uncaptured_forwards import UncapturedForwards

trees = torch_internals.cudagraph_trees
CUDAGraphTreeManager: Any = trees.CUDAGraphTreeManager
TreeManagerContainer: Any = trees.TreeManagerContainer

KEPT = "the program holds a result that the graph would overwrite"
FORWARD_UNCAPTURED = "its forward ran without a graph"

WRITES_INPUT = "it writes an input that is neither a parameter nor a result of another graph"
RECORDED_TOO_OFTEN = "inputs at fixed addresses moved more often than Inductor's cudagraph_unexpected_rerecord_limit"
"""Why stock's code leaves a function without a graph."""

INSIDE_CAPTURE = "it was called inside of a capture of the program's own"
INSIDE_FUNCTION = "it was called by a backward that an operator of another function runs"


def container(device_index: int) -> EncoreContainer:
    """The container of this thread (of the thread whose backward this one runs) for a CUDA device."""
    by_device = thread_containers().by_device
    found: EncoreContainer | None = by_device.get(device_index)
    return by_device.setdefault(device_index, EncoreContainer(device_index)) if found is None else found


class EncoreManager(MovedInputsManager):
    """CUDAGraph Trees whose functions are `RecordableFunction`s and whose nodes are `EncoreNode`s."""

    _add_function = with_globals(CUDAGraphTreeManager.add_function, get_container=container)
    _record_function = with_globals(CUDAGraphTreeManager.record_function, CUDAGraphNode=EncoreNode)

    def __init__(self, device_index: int, **keywords: Any) -> None:
        self.turn = threading.RLock()
        self.entered = threading.local()
        self.last_stream: int | None = None
        self._left: dict[int, list[Any]] = {}
        self._stream_before_capture: int | None = None
        self.inside_capture = False
        self.uncaptured_forwards = UncapturedForwards()
        self.running = False
        self._ran_uncaptured = False
        self._runs_function = self._took_part = False
        super().__init__(device_index, **keywords)

    # Calls

    def add_function(
        self,
        model: RecordableFunction,
        inputs: list[Any],
        static_input_idxs: Sequence[int],
        stack_traces: Any,
        mode: Any,
        constants: Any,
        placeholders: Sequence[Any],
        *others: Any,
    ) -> tuple[Any, Any]:
        """As stock's; calls are steady where they can be."""
        model.turn = self.turn
        # Note [Geometry at an unchanged address]. Of a backward only what the forward was given is compared: the
        # program has no hold of the rest.
        compared = [
            index
            for index in static_input_idxs
            if model.direction != "backward" or placeholders[index].name.startswith("primals")
        ]
        model.geometry = FixedGeometry(inputs, compared)
        known = stack_traces, mode, constants, placeholders
        full, outputs = self._add_function(model, inputs, static_input_idxs, *known, *others)
        return steadily(self, full), outputs

    def run(self, new_inputs: list[Any], function_id: Any) -> Any:
        """As stock's. Notes [Kept results], [Threads]. Steady calls pass it by: see `lean`.

        Note [Uncaptured forwards] in `uncaptured_forwards`.
        """
        if resting():
            return self.ids_to_funcs[function_id].model(new_inputs)
        if is_lent(self.turn):
            return self._run_inside(new_inputs, function_id)
        with self.turn:
            if self._runs_function:  # Note [Functions inside of functions]
                return self._function(function_id)(new_inputs)
            if self.running:  # stock calls itself once more after it ended an iteration
                return super().run(new_inputs, function_id)
            outputs = self._run_in_turn(new_inputs, function_id)
            if self.forgetting_is_due:
                self.forget_due_histories()
            return outputs

    def _run_in_turn(self, new_inputs: list[Any], function_id: Any) -> Any:
        """A call of the program's."""
        self.enter(function_id)
        function = self._function(function_id)
        reason = self._against_a_graph(function_id, function, new_inputs)
        if function.retiring:
            function.retiring = False
            self._free_what_is_retired()
        if reason is not None:
            return self.run_without_graph(new_inputs, function_id, reason)
        returned = {place: new_inputs[index] for place, index in function.returned_inputs.items()}
        fixed = self._parameters(function_id, new_inputs)
        self.running = True
        self._took_part = self._checkpoint_due = self._ran_uncaptured = False
        refused: tuple[EncoreNode, str, bool] | None = None  # not the error, which would hold this frame
        try:
            outputs = super().run(new_inputs, function_id)
        except NotLaunched as error:
            refused = error.node, error.reason, isinstance(error, NotFollowed)
        finally:
            self.running = False
        if refused is not None:
            return self.not_launched(*refused, new_inputs, function_id)
        if not self._took_part:
            function.ran_without_graph(self._left_by_stock(function_id))
        if not self._took_part or self._ran_uncaptured:
            self._mark_uncaptured(outputs, fixed)
            return outputs
        if returned:
            outputs = with_inputs(outputs, returned)
            self.uncaptured_forwards.unmark(returned.values())
        return self.kept_copied(function, outputs) if function.kept_outputs else outputs

    def _run_inside(self, inputs: list[Any], function_id: Any) -> Any:
        """A call of a backward that another function runs. Note [Backwards inside of functions] in `calls.turns`."""
        function = self._function(function_id)
        if self._runs_function:
            return function(inputs)
        return self.run_without_graph(inputs, function_id, INSIDE_FUNCTION)

    def _left_by_stock(self, function_id: Any) -> str:
        """Why stock's code just called a function as it is."""
        too_often = self.exceed_rerecord_limit(self._get_node_id(), function_id)
        return RECORDED_TOO_OFTEN if too_often else WRITES_INPUT

    def execute_node(self, node: Any, new_inputs: list[Any]) -> Any:
        """As stock's; the next call like this one may be a steady one."""
        with self._running_a_function():  # its session may capture it once more
            outputs = super().execute_node(node, new_inputs)
        if not node.is_latest:
            self.replays_another(node)
        self._expect_steady_calls(node)
        return outputs

    def replays_another(self, node: EncoreNode) -> None:
        """To be told where a function is not served by the recording that served it last.

        Results of that one refer to the backward of its last call, which refers to the parameters it was made for. They
        may have been swapped, and it may never be replayed again.
        """
        function = node.function
        before = function.latest() if function.latest is not None else None
        function.latest = weakref.ref(node)
        if before is not None and before is not node:
            before.let_another_serve()
        node.is_latest = True

    def steady_calls(self, function_id: Any) -> dict[EncoreNode | None, list[SteadyCall]]:
        """What there is for a function, by the recording before it; always the same dictionary."""
        return self._steady[function_id]

    def _expect_steady_calls(self, node: EncoreNode) -> None:
        function_id = node.wrapped_function.id
        if not node.function.lean:
            return
        found = self._steady[function_id]
        calls = [call for call in found.get(node.parent, ()) if call.valid]
        if not any(call.node is node for call in calls):
            made = steady_call(node)
            calls = [*([] if made is None else [made]), *calls][:MOST_KEPT]
            # What was recorded for a call's addresses comes before what copies it.
            calls.sort(key=lambda one: one.node.copies_parameters)
        if calls:
            found[node.parent] = calls
        else:
            found.pop(node.parent, None)

    def _against_a_graph(self, function_id: Any, function: RecordableFunction, inputs: Sequence[Any]) -> str | None:
        if self.current_node is not None and self._at_boundary() and not self.inside_capture:
            self._look_for_held_results()
        if function.without_graph is not None or self.inside_capture:
            return function.without_graph or INSIDE_CAPTURE
        if function.geometry is not None and not function.geometry.holds(inputs):
            function.geometry.require_dtypes(inputs)
            return OTHER_GEOMETRY
        if self.held_in_generation is not None:
            return KEPT
        is_backward = self.id_to_mode[function_id] is trees.CompilationMode.BACKWARD
        if is_backward and self.uncaptured_forwards.returned_any_of(inputs):
            return FORWARD_UNCAPTURED
        return None

    def run_without_graph(self, inputs: list[Any], function_id: Any, reason: str) -> Any:
        """Serve a call without a graph, on inputs that need not lie where a graph has them."""
        function = self._function(function_id)
        function.ran_without_graph(reason)
        mode = self.mode = self.id_to_mode[function_id]
        fixed = self._parameters(function_id, inputs)
        outputs = function(inputs)
        self._mark_uncaptured(outputs, fixed)
        # As `run` has it: forwards are pending after their call.
        if mode is trees.CompilationMode.FORWARD:
            self.running_forwards_with_pending_backwards = True
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

    def _parameters(self, function_id: Any, inputs: Sequence[Any]) -> list[Any] | None:
        """Return the parameters among a forward's inputs; None for other functions, which are not marked.

        What it writes may be a result of a graph, which must not be held during the call.
        """
        if self.id_to_mode[function_id] is not trees.CompilationMode.FORWARD:
            return None
        written = self._function(function_id).written_inputs
        static = self.ids_to_funcs[function_id].static_input_idxs
        return [
            inputs[index] for index in {*static, *self._function(function_id).ordinary_inputs} if index not in written
        ]

    def _mark_uncaptured(self, outputs: Sequence[Any], fixed: Sequence[Any] | None) -> None:
        """Mark what a forward without a graph returned; see `_parameters`."""
        if fixed is not None:
            live = self.current_node.path_live_weakrefs() if self.current_node is not None else ()
            self.uncaptured_forwards.mark(outputs, fixed, {reference.data_ptr() for reference in live})

    # Recording

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
            # Stock's waits for its stream only behind a warm-up that ends well, and the program goes on. Where the
            # device is lost, the program is to see the error that said so first.
            with contextlib.suppress(RuntimeError):
                torch.cuda.current_stream(self.device_index).wait_stream(self.stream)
            if not isinstance(error, Exception) or (warm_up.began and warm_up.results is None):
                node = self.current_node
                if isinstance(node, trees.CUDAWarmupNode) and len(node.tensor_weakrefs) != len(node.stack_traces):
                    node.stack_traces = []
                    node.outputs_weakrefs.clear()
                    node.tensor_weakrefs.clear()
                raise
            failure = f"it could not be warmed up in a graph's memory: {one_line(error)}"
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
        """Note [Functions inside of functions]. What is neither warmed up, recorded nor replayed does not come here."""
        before, self._runs_function = self._runs_function, True
        self._took_part = True
        try:
            yield
        finally:
            self._runs_function = before

    def record_function(self, new_inputs: list[Any], function_id: Any) -> Any:
        """As stock's. An input that comes to a third address becomes an ordinary one; see `moved_inputs`.

        Note [A recording that fails]. Without a graph where seeds of attention lie on the host: see `readable_seeds`.
        """
        function = self._function(function_id)
        if any_on_host(new_inputs, function.code().seeds):
            self._checkpoint_due = False
            self._note_uncaptured(function_id, FORWARD_UNCAPTURED)
            return function(new_inputs)
        with self._running_a_function():
            fitting = self._fitted_to_moved_inputs(new_inputs, function_id)
        if fitting is not None:
            self._checkpoint_due = False
            return self.execute_node(fitting, new_inputs)
        refused = self._not_recorded_again(function_id, new_inputs)
        if refused is not None:
            self._checkpoint_due = False
            self._note_uncaptured(function_id, refused)
            return function(new_inputs)
        replayed = self._checkpoint_due
        self._histories_forgotten()
        # A recording that is not replayed again, since a model is gone, would keep the parameters of its last call.
        for node in self._recorded_behind(self.current_node, function_id):
            node.forget_own_histories()
        self._apply_due_checkpoint()
        function.callers, function.together = self._callers, self._together
        if in_a_process_group() and (function.code().collective or function.code().opaque):
            free_before_process_groups_end(_free_all)
        inputs = self._kept_for_a_failure(new_inputs, self.ids_to_funcs[function_id].mutated_input_idxs)
        try:
            with self._running_a_function():
                outputs = self._record_function(new_inputs, function_id)
            tell_ranks(function)
            function.recorded_on(self.current_node._path_from_root)
            self._expect_steady_calls(self.current_node)
            function.note_returned_inputs(self.current_node.returned_inputs)
            returned = {place: inputs[index][0] for place, index in function.returned_inputs.items()}
            return with_inputs(outputs, returned) if returned else outputs
        except Exception as error:
            function.without_graph = f"it could not be recorded: {one_line(error)}"
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
        """A call that was to be warmed up or recorded runs without a graph."""
        self._function(function_id).ran_without_graph(reason)
        self._ran_uncaptured = self._took_part = True

    def _kept_for_a_failure(self, inputs: Sequence[Any], mutated: Collection[int]) -> list[tuple[Any, bool]]:
        """Inputs to run on if the recording fails, each with whether it must be copied first.

        Results of earlier graphs are not held: they have to die during the recording, as they will in
        replays. One that the function writes is the program's, and is written where it is.
        """
        node = self.current_node
        if node is None:
            return [(value, False) for value in inputs]
        kept: list[tuple[Any, bool]] = []
        for index, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and node._is_cuda_graph_recorded_tensor(value):
                kept.append((node.borrowed(value), index not in mutated))
            else:
                kept.append((value, False))
        return kept

    # Note [Threads]

    def enter(self, function_id: Any) -> None:
        if self.id_to_mode[function_id] is not trees.CompilationMode.BACKWARD:  # a backward has a thread of its own
            self._callers.add(threading.get_ident())
        if not hasattr(self.entered, "yes"):
            make_context_current(self.device_index)
            self.entered.yes = True
        self._follow_stream()

    def _follow_stream(self) -> None:
        """Let the current stream wait for those of earlier calls. Notes [Threads], [Results on other streams]."""
        stream = torch_internals.current_raw_stream(self.device_index)
        self.inside_capture = torch.cuda.is_current_stream_capturing()
        if stream == self.last_stream and not self.inside_capture:
            return
        if self.inside_capture:  # Note [Captures of the program's own]
            if self.last_stream is not None:
                self._stream_before_capture = self.last_stream
            self.last_stream = None  # each call asks again, until one is outside
            return
        before = self._last_called_on
        if before is not None and before != stream:
            node = self.current_node
            self._left[before] = list(node.path_live_weakrefs()) if node is not None else []
        self._left.pop(stream, None)
        for other in self._left:
            wait_for_stream(other, self.device_index)
        # Note [Results on other streams]
        self._left = _with_results(self._left)
        if self._left and self._histories_forgotten():
            self._left = _with_results(self._left)
        if self._left:
            self.last_stream, self._stream_before_capture = None, stream
        else:
            self.last_stream, self._stream_before_capture = stream, None

    @property
    def _last_called_on(self) -> int | None:
        """The stream of the last call that was not inside of a capture. It has waited for those of all others."""
        return self._stream_before_capture if self.last_stream is None else self.last_stream

    def _still_read(self, nodes: Iterable[EncoreNode]) -> None:
        """See `PoolManager`."""
        before = self._last_called_on
        if before is None:
            return
        stream = stream_of(before, self.device_index)
        for node in nodes:
            if node.session is not None:
                node.session.still_read(stream)

    def leave_pool(self) -> None:
        """As `PoolManager`'s. What is read in the pool that is left, no graph overwrites any more."""
        super().leave_pool()
        self._left.clear()

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


def follow_streams(device_index: int) -> None:
    """Order this thread's next work on a device after the graphs that it called. Note [Calls past the manager].

    Not inside of another function: the call of that one did so.
    """
    thread = threading.get_ident()
    for one in managers(device_index):
        moved = one.last_stream != torch_internals.current_raw_stream(device_index)
        if moved and thread in one._callers and not inside_a_function():
            with one.turn:
                one._follow_stream()


def _with_results(left: Mapping[int, Sequence[Any]]) -> dict[int, list[Any]]:
    """Those of the streams whose results are alive, with these."""
    found = {stream: [one for one in results if one() is not None] for stream, results in left.items()}
    return {stream: alive for stream, alive in found.items() if alive}


def _forget_all_histories() -> None:
    """Let go of the backwards that results refer to which nobody holds. Note [Models that are gone]."""
    for manager in managers():
        manager.forgetting_is_due = True
        in_a_call = manager.turn._is_owned()  # as `threading.Condition` asks
        if not in_a_call and manager.turn.acquire(blocking=False):
            try:
                manager.forget_all_histories()
            finally:
                manager.turn.release()


# Where a compiled frame is under way Dynamo would compile what is called, and hold what is asked about.
when_a_root_is_gone(torch.compiler.disable(_forget_all_histories, reason="it counts references"))


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

    def get_tree_manager(self, *arguments: Any, **keywords: Any) -> EncoreManager:
        with self.lock:
            if self.tree_manager is None:
                settings = named_arguments(super().get_tree_manager, arguments, keywords)
                self.tree_manager = EncoreManager(self.device_index, **settings)
            return self.tree_manager


_record = without_duplicates(with_globals(trees.cudagraphify, get_container=container))


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
