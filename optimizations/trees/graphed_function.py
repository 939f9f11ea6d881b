"""Provide the functions that Inductor calls in place of stock's CUDA-graphed functions, and make them for `hook`.

Such a function does what `torch._inductor.cudagraph_trees.cudagraphify_impl` does (one recording per value of the
integer inputs) with two differences. Encore's managers make the recordings. And inputs are aligned only when the
function itself runs, in warm-up and without a graph, instead of before each replay: a tracker aligns inputs that a
replay reads in place, and copied inputs need no alignment. If an aligned copy of a mutated input is made, its values
are written back.

Note [Measured alternatives]. The option `selection="measure"`, the papers' profiling in bounded form, times a function
without a graph, with a graph that copies inputs, and with one that reads them in place. It begins once nothing is
pending for the function's graphs. A race (`optimizations.race`) then runs the program's own calls by each alternative,
and all later calls by the fastest. No graph is an alternative for inference only: the backward of a forward without a
graph would have to run without one as well.

Note [Inputs that are written]. Stock runs a function without a graph if it writes an input that is neither a parameter
nor a result of another graph, such as a key-value cache that the program passes. A graph would write its placeholder.
Here such an input counts as an input at a fixed address, as parameters do: the graph writes the caller's memory, and a
call that passes another tensor is recorded again. Exceptions are

* backwards and programs of several partitions, whose inputs may be at new addresses in each call;
* writes that Inductor does not report (`GeneratedCode.written`);
* functions with collectives, because ranks may pass different buffers;
* more than a few values of integer inputs: a position in a cache that is passed as a number changes on every call.

Note [Misaligned inputs that are returned]. A partition of a program returns an input that a later partition reads or
writes. Run on an aligned copy, it would return the copy: the later partition would write the copy, and the caller's
tensor would not change. So the input itself is returned, as a replay does. If the function reused the input's memory
for a result, it returns that result.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from optimizations import torch_internals
from optimizations.calls.turns import backwards_here, inside_a_function, inside_another
from optimizations.graph.prelude_check import unload_kernels
from optimizations.in_place.generated import read_generated
from optimizations.options import Options
from optimizations.race import Events, Race, mark
from optimizations.report import ReportedFunction
from optimizations.report.recordings import Direction
from optimizations.selection import Decision
from optimizations.torch_internals.only_partition import only_partition
from optimizations.torch_internals.stock_trees import with_globals, without_duplicates
from optimizations.trees import containers, hook
from optimizations.trees.fast_path import on_fast_path
from optimizations.trees.function import RecordableFunction
from optimizations.trees.manager import EncoreManager
from optimizations.trees.readable_seeds import give_readable_seeds, with_readable_seeds
from optimizations.trees.reasons import INSIDE_CAPTURE
from optimizations.trees.streams import follow_streams

ALIGNMENT_BYTES = 16
"""The alignment that Inductor's kernels rely on, in bytes."""

MOST_SIZES_OF_WRITERS = 8
"""Most values of integer inputs for which a function that writes an input is recorded. Stock records none."""


class EncoreContainer(containers.TreeManagerContainer):
    """Hold an Encore manager in stock's container, which ends its manager once no function needs it."""

    tree_manager: EncoreManager | None

    def _finalize_tree_manager(self) -> None:
        if self.tree_manager is not None:
            self.tree_manager.outlived()
        super()._finalize_tree_manager()

    def get_tree_manager(self, *arguments: Any, **keywords: Any) -> EncoreManager:
        with self.lock:
            if self.tree_manager is None:
                settings = inspect.signature(super().get_tree_manager).bind(*arguments, **keywords)
                self.tree_manager = EncoreManager(self.device_index, **settings.arguments)
            return self.tree_manager


def container(device_index: int) -> EncoreContainer:
    """Return the container of the manager of a CUDA device."""
    found: EncoreContainer = containers.BY_DEVICE.setdefault(device_index, EncoreContainer(device_index))
    return found


_record = without_duplicates(with_globals(torch_internals.cudagraph_trees.cudagraphify, get_container=container))


class GraphedFunction:
    """Warm up, record and replay a function. It is called with the list of its inputs, which it empties.

    Args:
        options: the user's.
        report: called with each function that is recorded, and reads its report from it later.
        model: the function as Inductor generated it.
        static_input_idxs, ...: as for `torch._inductor.compile_fx.cudagraphify`.

    Attributes:
        callers_get: see `RecordableFunction`; set before the first call.
    """

    def __init__(
        self,
        options: Options,
        report: Callable[[ReportedFunction], None],
        model: Callable[[list[Any]], Any],
        static_input_idxs: Sequence[int] = (),
        *,
        mutated_input_idxs: Sequence[int] = (),
        **keywords: Any,
    ) -> None:
        self._generated = model
        code = self._code = functools.cache(lambda: read_generated(model))
        self._model = with_readable_seeds(model, lambda: code().seeds)
        self._options = options
        self._report = report
        is_backward, is_inference = keywords["is_backward"], keywords["is_inference"]
        self._direction: Direction = "backward" if is_backward else "inference" if is_inference else "forward"
        self._static_input_idxs = static_input_idxs
        self._mutated_input_idxs = mutated_input_idxs
        self._keywords = keywords
        self._compile_id = torch_internals.CompileContext.current_compile_id()
        self._integers: list[int] = []
        self._recorded: dict[tuple[int, ...], Callable[[list[Any]], Any]] = {}
        self._functions: dict[tuple[int, ...], RecordableFunction] = {}
        self._measured: dict[tuple[int, ...], tuple[Decision, str]] = {}
        self.callers_get: frozenset[int] | None = None
        self._warned = False
        self._lock = threading.RLock()
        containers.GRAPHED.add(self)

    def __call__(self, inputs: list[Any]) -> Any:
        integers = self._integers
        recorded = self._recorded.get(tuple([inputs[index] for index in integers]) if integers else ())
        if recorded is not None:
            return recorded(inputs)
        if inside_a_function():
            return self._first_call_inside(inputs)
        follow_streams(self._keywords["device_index"])  # before the lock below: it takes a manager's
        with self._lock:  # two threads may make the first call
            return backwards_here(self._first_call, inputs)

    def forget(self) -> None:
        """Drop all recordings; the next call records again, with the manager of that time."""
        if self._options.selection == "measure":
            functions = list(self._functions.items())
            self._measured.update((key, (one.decision, one.why)) for key, one in functions if one.decision is not None)
        self._recorded, self._functions = {}, {}  # a call in another thread notes in the old ones what it records

    @property
    def is_measured_now(self) -> bool:
        """Return whether alternatives are being timed for this function."""
        return any(isinstance(one, Measured) and one.race is not None for one in list(self._recorded.values()))

    def _first_call_inside(self, inputs: list[Any]) -> Any:
        """Make the first call, inside of another function, without waiting. Note [Order of locks] in `calls.turns`."""
        try:
            if self._lock.acquire(blocking=False):
                return self._first_call(inputs)
        finally:
            with contextlib.suppress(RuntimeError):  # this thread does not have it
                self._lock.release()
        return self._on_aligned(inputs)(inputs)

    def _on_aligned(self, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Return the function as it runs without a graph, for inputs like these."""
        checked = torch_internals.cudagraph_trees.get_input_idxs_to_check(inputs, self._static_input_idxs)
        if not checked:
            return self._model
        return on_aligned_inputs(self._model, checked, self._mutated(), self._code().returns)

    def _mutated(self) -> Sequence[int]:
        return torch_internals.cudagraph_trees.OrderedSet((*self._mutated_input_idxs, *sorted(self._code().written)))

    def _first_call(self, inputs: list[Any]) -> Any:
        trees = torch_internals.cudagraph_trees
        self._integers = [index for index, value in enumerate(inputs) if isinstance(value, int)]
        key = tuple(inputs[index] for index in self._integers)
        recordings, functions = self._recorded, self._functions  # `forget` replaces them at any time
        if key in recordings:
            return recordings[key](inputs)
        sizes = key[0] if len(key) == 1 else key or None  # as the user writes them in `cudagraph_capture_sizes`
        aligned = self._on_aligned(inputs)
        if not trees.is_cudagraph_capture_sizes(sizes):
            return aligned(inputs)
        if not self._warned:
            self._warned = trees.maybe_warning_due_to_dynamic_shape(recordings, sizes)
        recordable = functions.get(key)
        if recordable is None:
            recordable = functions[key] = self._make(key, aligned)
        recordable.run = aligned
        if recordable.decision == "no graph":
            outputs = recordable.run_past_manager(inputs)
            result_bytes = sum(one.nbytes for one in outputs if isinstance(one, torch.Tensor))
            if not recordable.keeps_graph_for_results(result_bytes):
                recordings[key] = recordable.run_past_manager
            return outputs
        recordable.written_inputs = self._written_inputs(inputs)
        static = trees.remove_unaligned_input_idxs(inputs, self._static_input_idxs)
        static = sorted({*static, *recordable.written_inputs})
        if not hook.at_rest_now and torch.cuda.is_current_stream_capturing():  # creating a manager makes a capture
            recordable.ran_without_graph(INSIDE_CAPTURE)
            return recordable(inputs)
        full, outputs = _record(
            recordable,
            inputs,
            static,
            mutated_input_idxs=tuple(self._mutated()),
            compile_id=self._compile_id,
            **self._keywords,
        )
        recorded = on_fast_path(full.func.__self__, full)
        if self._options.selection == "measure" and recordable.decision is None:
            recorded = Measured(recordable, recorded)
        recordings[key] = recorded
        return outputs

    def _make(self, key: tuple[int, ...], run: Callable[[list[Any]], Any]) -> RecordableFunction:
        """Return a function for these values of integer inputs, which may be decided to have no graph."""
        this, device_index = weakref.ref(self), self._keywords["device_index"]

        def replace_call(function: RecordableFunction, call: Callable[[list[Any]], Any]) -> None:
            found = this()
            if found is not None and key in (known := found._recorded) and found._functions.get(key) is function:
                known[key] = call

        made = RecordableFunction(
            run, self._generated, self._options, self._direction, self._code, device_index, replace_call
        )
        made.callers_get = self.callers_get
        # Functions for other sizes compare the same parameters, and their kernels wait for each other in the same way.
        others = list(self._functions.values())
        made.geometry = next((one.geometry for one in others if one.geometry is not None), None)
        made.chain = made.chain or next((one.chain for one in others if one.chain is not None), None)
        self._report(made)
        if key in self._measured:
            made.decide(*self._measured[key])
        made.decide_before_recording()
        return made

    def _written_inputs(self, inputs: Sequence[Any]) -> list[int]:
        """Return the places of the inputs that are written. Note [Inputs that are written]."""
        unfit = self._direction == "backward" or self._code().is_partition or self._code().collective
        if unfit or len(self._recorded) >= MOST_SIZES_OF_WRITERS:
            return []
        others = sorted(set(self._mutated_input_idxs).difference(self._static_input_idxs))
        found = [index for index in others if isinstance(inputs[index], torch.Tensor)]
        aligned: list[int] = torch_internals.cudagraph_trees.remove_unaligned_input_idxs(inputs, found)
        return aligned


class Measured:
    """Run the calls of a function until its alternative is chosen. Note [Measured alternatives].

    Args:
        function: the function.
        recorded: runs a call through the function's manager.

    Attributes:
        race: times the alternatives; None before it begins and after it ended.
    """

    def __init__(self, function: RecordableFunction, recorded: Callable[[list[Any]], Any]) -> None:
        self._function = function
        self._recorded = recorded
        self._mark = functools.partial(mark, function.device_index)
        self.race: Race | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        race, function = self.race, self._function
        if hook.at_rest_now or inside_another(function.turn) or torch.cuda.is_current_stream_capturing():
            return self._recorded(inputs)
        if race is None:
            outputs = self._recorded(inputs)
            if function.waiting is None or function.without_graph is not None:
                self._begin()
            return outputs
        outputs = race.run(functools.partial(self._run_by, inputs))
        if race.winner is not None:
            function.median_us = race.median_us
            times = ", ".join(f"{name} {microseconds:.1f} us" for name, microseconds in race.median_us.items())
            self._decide(race.winner, f"measured: {times}")
        return outputs

    def _begin(self) -> None:
        """Begin a race, unless there is nothing to choose from."""
        function = self._function
        in_place = any(one.indirect for report in function.recordings() for one in report.inputs)
        alternatives = ["in place", "copies"] if in_place else ["copies"]
        if function.direction == "inference" and not any(node.short_of_memory() for node in function.nodes()[:1]):
            alternatives.append("no graph")
        if function.without_graph is None and not function.code().collective and len(alternatives) > 1:
            self.race = Race(alternatives)
        else:
            self._decide(alternatives[0], "there is nothing to choose from")

    def _run_by(self, inputs: list[Any], alternative: str) -> tuple[Any, Events | None]:
        """Run a call by an alternative. Return the results, and its events if it really ran by that alternative."""
        function, start = self._function, self._mark()
        if alternative == "no graph":
            return function.run_past_manager(inputs), (start, self._mark())
        function.copy_inputs(alternative == "copies")
        before = function.replays()
        outputs = self._recorded(inputs)
        return outputs, (start, self._mark()) if function.replays() == before + 1 else None

    def _decide(self, decision: str, why: str) -> None:
        self.race = None
        if decision != "no graph":
            self._function.copy_inputs(decision == "copies")
        if self._function.without_graph is None:
            self._function.decide(cast(Decision, decision), why)
        self._function.replace_call(self._function, self._recorded)


class EncoreMaker:
    """Make CUDA graphs of compiled functions in stock's place, for one compilation. See `hook`.

    Args:
        options: the user's; `indirection` is anything but "off".
        report: called with every function that is made into CUDA graphs, and reads its report from it later.
    """

    def __init__(self, options: Options, report: Callable[[ReportedFunction], None]) -> None:
        self._options = options
        self._report = report
        self.forward: Any = None  # the `CompiledFxGraph` of a forward, until its autograd function is made

    def cudagraphify(self, *arguments: Any, **keywords: Any) -> GraphedFunction:
        """See `torch._inductor.compile_fx.cudagraphify`."""
        return GraphedFunction(self._options, self._report, *arguments, **keywords)

    def get_manager(self, device_index: int | None = None, create_if_none_exists: bool = True) -> Any:
        """See `torch._inductor.cudagraph_trees.get_manager`.

        It is created if missing: a backward from a cache is compiled before its forward was ever called, and stock
        asserts that the manager exists.
        """
        index = torch.cuda.current_device() if device_index is None else device_index
        return container(index).get_tree_manager()

    def compiled(self, compiled_graph: Any, *, graphed: bool) -> None:
        """Callback: Inductor compiled or loaded `compiled_graph`; `graphed`: CUDA graphs run its functions."""
        give_readable_seeds(compiled_graph, graphed=graphed)
        settings = compiled_graph.fx_kwargs
        if graphed and not settings.get("is_backward") and not settings.get("is_inference"):
            self.forward = compiled_graph

    def forward_returns(self, count: int) -> None:
        """Callback: callers get the first `count` results of the last compiled forward. The others are saved."""
        forward, self.forward = self.forward, None
        function, places = getattr(forward, "current_callable", None), list(range(count))
        if (found := only_partition(forward)) is not None:
            runner, order = found
            function, places = runner.partitions[0], [order.results[place] for place in places]
        if isinstance(function, GraphedFunction):
            function.callers_get = frozenset(places)


def release_recordings() -> None:
    """Free all of Encore's graphs, memory pools, placeholders and kernels. Functions record again when called."""
    containers.free_all()
    unload_kernels()


def on_aligned_inputs(
    model: Callable[[list[Any]], Any],
    checked: Sequence[int],
    written: Sequence[int],
    returns: Callable[[int], bool],
) -> Callable[[list[Any]], Any]:
    """Return a function that calls `model` with copies in place of misaligned inputs.

    Args:
        model: called with the list of its inputs, which it empties.
        checked: indices of tensors that `model` requires to be aligned.
        written: indices of inputs that it writes; values written to a copy are copied back.
        returns: whether an input that `model` returns is that input, and not a result in its memory.
    """

    def run(inputs: list[Any]) -> Any:
        given = {index: inputs[index] for index in checked if inputs[index].data_ptr() % ALIGNMENT_BYTES}
        if not given:
            return model(inputs)
        copies = {index: torch_internals.clone_preserve_strides(value) for index, value in given.items()}
        for index, value in copies.items():
            inputs[index] = value
        outputs = model(inputs)
        changed = [index for index in copies if index in written]
        if changed:
            torch_internals.foreach_copy_([given[index] for index in changed], [copies[index] for index in changed])
        originals = {id(copies[index]): value for index, value in given.items() if returns(index)}
        return [originals.get(id(output), output) for output in outputs] if originals else outputs

    return run
