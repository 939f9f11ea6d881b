"""Provide the function that Inductor calls in place of stock's CUDA-graphed function.

It does what `torch._inductor.cudagraph_trees.cudagraphify_impl` does (one recording per value of the integer inputs)
with two differences. Encore's managers make the recordings. And inputs are aligned only when the function itself runs,
in warm-up and without a graph, instead of before each replay: a tracker aligns inputs that a replay reads in place, and
copied inputs need no alignment. If an aligned copy of a mutated input is made, its values are written back.

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
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.calls.turns import backwards_here, inside_a_function
from optimizations.in_place.generated import read_generated
from optimizations.options import Options
from optimizations.report import ReportedFunction
from optimizations.report.recordings import Direction
from optimizations.selection import Decision
from optimizations.torch_internals.stock_trees import named_arguments, with_globals, without_duplicates
from optimizations.trees import containers
from optimizations.trees.fast_path import on_fast_path
from optimizations.trees.function import RecordableFunction
from optimizations.trees.hook import resting
from optimizations.trees.manager import EncoreManager
from optimizations.trees.measured import Measured
from optimizations.trees.readable_seeds import with_readable_seeds
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
                settings = named_arguments(super().get_tree_manager, arguments, keywords)
                self.tree_manager = EncoreManager(self.device_index, **settings)
            return self.tree_manager


def container(device_index: int) -> EncoreContainer:
    """Return the container of the manager of a CUDA device."""
    found: EncoreContainer = containers.BY_DEVICE.setdefault(device_index, EncoreContainer(device_index))
    return found


_record = without_duplicates(with_globals(torch_internals.cudagraph_trees.cudagraphify, get_container=container))


def record(
    function: RecordableFunction, inputs: list[Any], *arguments: Any, **keywords: Any
) -> tuple[Callable[[list[Any]], Any] | None, Any]:
    """Record a function as `torch._inductor.cudagraph_trees.cudagraphify` does, with Encore's managers.

    Returns:
        The function to call from now on (None: nothing was recorded), and the results of this call.

    Inside of a capture by the program nothing is recorded, because creating a manager makes a capture.
    """
    if not resting() and torch.cuda.is_current_stream_capturing():
        function.ran_without_graph(INSIDE_CAPTURE)
        return None, function(inputs)
    full, outputs = _record(function, inputs, *arguments, **keywords)
    return on_fast_path(full.func.__self__, full), outputs


class GraphedFunction:
    """Warm up, record and replay a function. It is called with the list of its inputs, which it empties.

    Args:
        model: the function as Inductor generated it.
        options: the user's.
        report: called with each function that is recorded, and reads its report from it later.
        direction: the function's direction.
        static_input_idxs, mutated_input_idxs, keywords: as for `torch._inductor.compile_fx.cudagraphify`.

    Attributes:
        callers_get: see `RecordableFunction`; set before the first call.
    """

    def __init__(
        self,
        model: Callable[[list[Any]], Any],
        options: Options,
        report: Callable[[ReportedFunction], None],
        direction: Direction,
        *,
        static_input_idxs: Sequence[int] = (),
        mutated_input_idxs: Sequence[int] = (),
        **keywords: Any,
    ) -> None:
        self._generated = model
        code = self._code = functools.cache(lambda: read_generated(model))
        self._model = with_readable_seeds(model, lambda: code().seeds)
        self._options = options
        self._report = report
        self._direction: Direction = direction
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
        recorded, outputs = record(
            recordable,
            inputs,
            static,
            mutated_input_idxs=tuple(self._mutated()),
            compile_id=self._compile_id,
            is_backward=self._direction == "backward",
            is_inference=self._direction == "inference",
            **self._keywords,
        )
        if recorded is None:
            return outputs
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
        # Functions for other sizes compare the same parameters.
        made.geometry = next((one.geometry for one in list(self._functions.values()) if one.geometry is not None), None)
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
