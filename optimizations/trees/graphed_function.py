"""Provide the function that Inductor calls where stock would call its CUDA-graphed one.

It does what `torch._inductor.cudagraph_trees.cudagraphify_impl` does (one recording per value of the integer inputs)
with two differences. Recordings are made by Encore's managers. And inputs that Inductor wants aligned are aligned where
the function is really run, in warm-up and without a graph, instead of before each replay: a replay aligns what it reads
in place itself, and what it copies needs no alignment. A mutated input that was copied for that is written back.

Note [Inputs that are written]. Stock leaves a function without a graph that writes an input which is neither a
parameter nor a result of another graph: a key-value cache that the program passes, say. A graph would write its copy.
Here such an input is taken for one at a fixed address, as parameters are: the graph writes the caller's memory, and
where the next call passes another tensor, it is recorded again. Not so in backwards and in programs of several
partitions, whose inputs may be at new addresses in each call; where Inductor does not say that it is written
(`GeneratedCode.written`); with collectives, whose ranks may pass buffers apart; and for more than a few values of
integer inputs: a place in a cache that is passed as a number changes on every call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.selection import Decision
from optimizations.trees.aligned import on_aligned_inputs
from optimizations.trees.function import RecordableFunction
from optimizations.trees.measured import Measured
from optimizations.weak_registry import WeakRegistry

MOST_SIZES_OF_WRITERS = 8
"""Values of the integer inputs for which a function that writes an input is recorded. Stock records none."""

Record = Callable[..., tuple[Callable[[list[Any]], Any] | None, Any]]
"""`torch._inductor.cudagraph_trees.cudagraphify` with Encore's managers: what to call from now on (None: nothing was
recorded), and a result."""


class GraphedFunction:
    """Warm up, record and replay a function. It is called with the list of its inputs, which it empties.

    Args:
        model: the function as Inductor generated it.
        recordable: makes what is recorded of a function whose inputs are aligned.
        record: see `Record`.
        written: gives inputs that it writes besides `mutated_input_idxs`.
        returns: whether a later partition is given this input as a result. Note [Misaligned inputs that are returned].
        follow_streams: orders a call that goes past the manager after the graphs before it.
        mutated_input_idxs, keywords: as for `torch._inductor.compile_fx.cudagraphify`.
    """

    def __init__(
        self,
        model: Callable[[list[Any]], Any],
        recordable: Callable[[Callable[[list[Any]], Any]], RecordableFunction],
        record: Record,
        *,
        static_input_idxs: Sequence[int],
        mutated_input_idxs: Sequence[int],
        written: Callable[[], Iterable[int]] = tuple,
        returns: Callable[[int], bool] = lambda index: False,
        follow_streams: Callable[[], None] = lambda: None,
        **keywords: Any,
    ) -> None:
        self._model = model
        self._recordable = recordable
        self._record = record
        self._static_input_idxs = static_input_idxs
        self._mutated_input_idxs = mutated_input_idxs
        self._written = written
        self._returns = returns
        self._follow_streams = follow_streams
        self._keywords = keywords
        self._compile_id = torch_internals.CompileContext.current_compile_id()
        self._integers: list[int] = []
        self._recorded: dict[tuple[int, ...], Callable[[list[Any]], Any]] = {}
        self._with_graph: dict[tuple[int, ...], RecordableFunction] = {}
        self._measured: dict[tuple[int, ...], tuple[Decision, str]] = {}
        self._callers_get: frozenset[int] | None = None
        self._warned = False
        self._lock = threading.RLock()
        _LIVE.add(self)

    def __call__(self, inputs: list[Any]) -> Any:
        integers = self._integers
        recorded = self._recorded.get(tuple([inputs[index] for index in integers]) if integers else ())
        if recorded is not None:
            return recorded(inputs)
        self._follow_streams()  # it waits for a manager, which one does not under a lock
        with self._lock:  # two threads may be the first
            return self._first_call(inputs)

    def tell_what_callers_get(self, places: frozenset[int]) -> None:
        """See `RecordableFunction.callers_get`. To be called before the first call."""
        self._callers_get = places

    def forget(self) -> None:
        """Drop everything recorded; the next call records again, with the manager there is then."""
        self._recorded.clear()
        self._with_graph.clear()

    @property
    def is_measured_now(self) -> bool:
        """Return whether a race runs that decides how calls are served."""
        return any(isinstance(one, Measured) and one.is_running for one in list(self._recorded.values()))

    def _first_call(self, inputs: list[Any]) -> Any:
        trees = torch_internals.cudagraph_trees
        self._integers = [index for index, value in enumerate(inputs) if isinstance(value, int)]
        key = tuple(inputs[index] for index in self._integers)
        if key in self._recorded:
            return self._recorded[key](inputs)
        checked = trees.get_input_idxs_to_check(inputs, self._static_input_idxs)
        mutated = trees.OrderedSet((*self._mutated_input_idxs, *sorted(self._written())))
        sizes = key[0] if len(key) == 1 else key or None  # as the user writes them in `cudagraph_capture_sizes`
        aligned = on_aligned_inputs(self._model, checked, mutated, self._returns)
        if not trees.is_cudagraph_capture_sizes(sizes):
            return aligned(inputs)
        if not self._warned:
            self._warned = trees.maybe_warning_due_to_dynamic_shape(self._recorded, sizes)
        recordable = self._with_graph.pop(key, None)
        if recordable is None:
            recordable = self._recordable(aligned)
            if key in self._measured:
                recordable.decide(*self._measured[key])
            if recordable.goes_without_graph():
                return self._first_call_without_graph(recordable, key, inputs)
        recordable.callers_get = self._callers_get
        recordable.written_inputs = self._written_inputs(inputs, recordable)
        static = trees.remove_unaligned_input_idxs(inputs, self._static_input_idxs)
        static = sorted({*static, *recordable.written_inputs})
        recorded, outputs = self._record(
            recordable,
            inputs,
            static,
            mutated_input_idxs=tuple(mutated),
            compile_id=self._compile_id,
            **self._keywords,
        )
        if recorded is None:
            return outputs
        this = weakref.ref(self)

        def serve_by(call: Callable[[list[Any]], Any]) -> None:
            found = this()
            if found is not None and key in found._recorded:
                found._recorded[key] = call

        def decided(decision: Decision, why: str) -> None:
            serve_by(recorded)
            if (found := this()) is not None:
                found._measured[key] = decision, why

        recordable.serve_by = serve_by
        recordable.follow_streams = self._follow_streams
        measures = recordable.selection_mode == "measure" and recordable.decision is None
        self._recorded[key] = (
            Measured(recordable, recorded, self._keywords["device_index"], decided) if measures else recorded
        )
        return outputs

    def _first_call_without_graph(self, function: RecordableFunction, key: tuple[int, ...], inputs: list[Any]) -> Any:
        """Serve a call of a function that is too small for a graph, unless its results turn out to be large."""
        outputs = function.run_past_manager(inputs)
        result_bytes = sum(one.nbytes for one in outputs if isinstance(one, torch.Tensor))
        if function.keeps_graph_for_results(result_bytes):
            self._with_graph[key] = function
        else:
            function.follow_streams = self._follow_streams
            self._recorded[key] = function.run_past_manager
        return outputs

    def _written_inputs(self, inputs: Sequence[Any], function: RecordableFunction) -> list[int]:
        """Return the places of the inputs that are written. Note [Inputs that are written]."""
        if function.direction == "backward" or function.is_one_of_several or function.code().collective:
            return []
        if len(self._recorded) >= MOST_SIZES_OF_WRITERS:
            return []
        parameters = set(self._static_input_idxs)
        found = [
            index
            for index in self._mutated_input_idxs
            if index not in parameters and isinstance(inputs[index], torch.Tensor)
        ]
        aligned: list[int] = torch_internals.cudagraph_trees.remove_unaligned_input_idxs(inputs, found)
        return aligned


_LIVE: WeakRegistry[GraphedFunction] = WeakRegistry()


def forget_recordings(functions: Iterable[GraphedFunction] | None = None) -> None:
    """Let these functions, by default all there are, drop what they recorded."""
    for function in _LIVE.alive() if functions is None else list(functions):
        function.forget()


def races_run() -> bool:
    """Return whether calls of any function take part in a race now."""
    return any(function.is_measured_now for function in _LIVE.alive())
