"""Run the fast path of a recording: from the function to the launch with the necessary checks only.

Stock's manager decides in Python, in each call, which recording to replay. After a recording, or a replay on the slow
path, the decision is stored (`EncoreNode.takes_fast_path`). From then on a call under the same conditions takes few
steps: one comparison in C++ of all fixed addresses, one of all inputs read in place, a check for live results, the
launch, and the list of results. If anything differs, the call takes the slow path before it has had any effect, so
stock's behaviour is kept.

Note [Loops]. A function may be called at a point where it was never recorded: the current recording has no child of
this function. If no result of the current path is live, stock then starts a new path with the function, although the
iteration continues. This happens in each round of a loop that calls a compiled block and keeps no results. The fast
path then starts a new path in the same way as at the beginning of an iteration.

Note [What a fast call skips]. In the order of the slow path of PyTorch 2.11:

* `CUDAGraphTreeManager._run` ends a recording or warm-up in progress: fast calls are made in the state EXECUTION only.
  It checks whether the function changes inputs that it has not recorded: the result depends on the node in the tree
  only, and was no when the recording was made there. It tries the children of the current recording before it begins a
  new path: a fast call begins one only if no child is of the same function.
* `can_start_new_generation`, `EncoreManager._check_held_results` and `StorageWeakRefWrapper.expired` check whether an
  iteration begins, whether backwards are pending and which results are live: a fast call reads the same state.
* `CallStreams.enter` is skipped in a thread that called before on the same stream.
* `CUDAGraphNode.check_invariants` compares addresses and checks that certain results have died: a fast call does so by
  one comparison. If inputs moved that must not move, the slow path raises.
* Copies of inputs with a forward-mode derivative raise: inside a level of forward mode, calls take the slow path.
* `CUDAGraphNode.run` checks and synchronizes under debugging options: with one of these, there are no fast calls.
* `Session.run` does the work that follows a recording: while some is due, calls take the slow path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.calls.turns import RUNNING, inside_another
from optimizations.in_place.session import Stage
from optimizations.trees import hook, reasons
from optimizations.trees.function import RecordableFunction
from optimizations.trees.liveness import any_alive
from optimizations.trees.manager import EncoreManager
from optimizations.trees.node import EncoreNode
from optimizations.trees.readable_seeds import any_on_host
from optimizations.trees.results import kept_copied

trees = torch_internals.cudagraph_trees


def on_fast_path(manager: EncoreManager, full: functools.partial[Any]) -> Callable[[list[Any]], Any]:
    """Return a function that replaces `full`, a manager's function, and takes the fast path if possible.

    One function contains the whole fast path, in the order of the slow path, because a Python call costs as much as a
    check. If anything has changed, the call is counted with its reason and takes the slow path.
    """
    function_id = full.keywords["function_id"]
    function: RecordableFunction = manager.ids_to_funcs[function_id].model
    if not function.options.lean:
        return full
    mode = manager.id_to_mode[function_id]
    is_forward, is_backward = mode is trees.CompilationMode.FORWARD, mode is trees.CompilationMode.BACKWARD
    turn, streams, device_index = manager.turn, manager.streams, manager.device_index
    entered = streams.entered
    entered_as = "backward" if is_backward else "forward"
    executing, steps = trees.ExecutionState.EXECUTION, trees.MarkStepBox
    generations, done = trees.GenerationTracker, Stage.DONE
    data_ptrs_equal, running = torch_internals.data_ptrs_equal, RUNNING
    forward_mode = torch_internals.forward_ad
    is_capturing = torch.cuda.is_current_stream_capturing

    def call(inputs: list[Any]) -> Any:
        if hook.at_rest_now:
            return full(inputs)
        if running and inside_another(turn):
            return full(inputs)
        with turn:
            if manager.running:  # a call inside a call on the slow path
                return full(inputs)
            if not hasattr(entered, entered_as) or torch_internals.current_raw_stream(device_index) != streams.last:
                streams.enter(is_backward, manager.current_node)
            if is_capturing():  # the program may capture on the stream that its calls were on before
                return take_slow_path(inputs, reasons.INSIDE_CAPTURE)
            if forward_mode._current_level >= 0:
                return take_slow_path(inputs, reasons.FORWARD_MODE)
            if function.geometry is None or not function.geometry.holds(inputs):
                return take_slow_path(inputs, reasons.OTHER_GEOMETRY)
            if manager.path_state is not executing:
                return take_slow_path(inputs, reasons.NOT_EXECUTING)
            if function.without_graph is not None:
                return take_slow_path(inputs, function.without_graph)
            if manager.held_in_generation is not None:
                return take_slow_path(inputs, reasons.KEPT)
            current: EncoreNode = manager._current_node
            generation = steps.mark_step_counter or generations.generation
            begins = generation != manager.current_gen
            following: Sequence[EncoreNode] = (manager.roots if begins else current.children).get(function_id, ())
            if not following and not begins and not manager.running_forwards_with_pending_backwards:
                following, begins = manager.roots.get(function_id, ()), True  # Note [Loops]

            node: EncoreNode | None = None
            why: str | None = None
            for one in following:
                if not one.takes_fast_path:
                    why = reasons.NOT_RECORDED
                elif one.compared and not data_ptrs_equal(inputs, one.static_input_data_ptrs, one.compared):
                    why = reasons.FIXED_INPUT_MOVED
                elif one.seeds and any_on_host(inputs, one.seeds):
                    why = reasons.FORWARD_UNCAPTURED
                elif one.dead_before and any_alive(one.dead_before):
                    why = reasons.KEPT
                else:
                    node = one
                    break
            if node is None:
                return take_slow_path(inputs, why or reasons.OTHER_ORDER)
            if begins:
                if manager.running_forwards_with_pending_backwards and not steps.mark_step_counter:
                    return take_slow_path(inputs, reasons.BACKWARD_PENDING)
                if current.children and current.children.get(function_id):
                    return take_slow_path(inputs, reasons.ANOTHER_FOLLOWS)
                if any_alive(current.results_alive):
                    return take_slow_path(inputs, reasons.KEPT)
            session = node.session
            # A session that is done may have a graph whose update was interrupted.
            if session is not None and (session.stage is not done or session.unusable) and not session.rests(inputs):
                return take_slow_path(inputs, reasons.WORK_IS_DUE)

            for index in node.dying:
                inputs[index] = None
            if node.dead_after and any_alive(node.dead_after):
                node.give_back_inputs(inputs)
                function.took_the_slow_path(reasons.INPUT_STILL_HELD)
                return manager.run_without_graph(inputs, function_id, reasons.INPUT_STILL_HELD)

            # From here on the graph is replayed, as by `CUDAGraphTreeManager.execute_node` and `CUDAGraphNode.run`. The
            # manager's `mode` and `compile_id` are not set: they are read only after `run`, which sets them.
            manager._current_node = node
            manager.current_gen = generation
            node.replays += 1
            node.copied_bytes += node.copied_per_replay
            tracker = node.tracker
            if tracker is not None:
                try:
                    tracker.follow(inputs)
                except Exception as error:
                    refused = node.not_followed(error)
                    function.took_the_slow_path(refused.reason)
                    return manager.not_launched(refused, inputs, function_id)
            if node.non_static_input_idx:
                node.copy_recording_inputs(inputs)
            node.graph.replay()
            if tracker is not None and tracker.pending:
                tracker.launched()
            outputs: list[Any] = node.results.of_call(inputs)
            inputs.clear()
            if is_forward:
                manager.running_forwards_with_pending_backwards = True
            elif is_backward:
                manager.running_forwards_with_pending_backwards = False
            if function.kept_outputs:
                outputs = kept_copied(node, outputs)
            return outputs

    def take_slow_path(inputs: list[Any], reason: str) -> Any:
        function.took_the_slow_path(reason)
        return full(inputs)

    return call
