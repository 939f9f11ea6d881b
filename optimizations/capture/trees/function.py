"""The function Inductor calls where stock would call its CUDA-graphed one.

It does what `torch._inductor.cudagraph_trees.cudagraphify_impl` does (one recording per value of the integer inputs)
with two differences. Recordings are made by Encore's managers. And inputs that Inductor wants aligned are aligned where
the function is really run, in warm-up and without a graph, instead of before each replay: a replay aligns what it reads
in place itself, and what it copies needs no alignment. A mutated input that was copied for that is written back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from optimizations import torch_internals
from optimizations.indirection.plan import Choice
from optimizations.report.recordings import Direction, RecordingReport


@dataclass(slots=True)
class Capturable:
    """What a manager records: a function of Inductor's, called with the list of its inputs, which it empties.

    Attributes:
        run: the function, its inputs aligned first.
        generated: the function as Inductor generated it.
        report: takes the report of each recording.
        mutation_refused: why an input that the function writes cannot be read in place; None while nothing speaks
            against it. Once it is set, the function runs without a graph wherever stock would run it so.
    """

    run: Callable[[list[Any]], Any]
    generated: Callable[[list[Any]], Any]
    choice: Choice
    direction: Direction
    report: Callable[[RecordingReport], None]
    mutation_refused: str | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        return self.run(inputs)


Record = Callable[..., tuple[Callable[[list[Any]], Any], Any]]
"""`torch._inductor.cudagraph_trees.cudagraphify` with Encore's managers: what to call from now on, and a result."""


class CapturedFunction:
    """A function that is warmed up, recorded and replayed; called with the list of its inputs, which it empties.

    Args:
        model: the function as Inductor generated it.
        capturable: makes what is recorded of a function whose inputs are aligned.
        record: see `Record`.
        mutated_input_idxs, keywords: as for `torch._inductor.compile_fx.cudagraphify`.
    """

    def __init__(
        self,
        model: Callable[[list[Any]], Any],
        capturable: Callable[[Callable[[list[Any]], Any]], Capturable],
        record: Record,
        *,
        static_input_idxs: Sequence[int],
        mutated_input_idxs: Sequence[int],
        **keywords: Any,
    ) -> None:
        self._model = model
        self._capturable = capturable
        self._record = record
        self._static_input_idxs = static_input_idxs
        self._mutated_input_idxs = mutated_input_idxs
        self._keywords = keywords
        self._compile_id = torch_internals.CompileContext.current_compile_id()
        self._integers: list[int] = []
        self._recorded: dict[tuple[int, ...], Callable[[list[Any]], Any]] = {}
        self._warned = False
        _LIVE.add(self)

    def __call__(self, inputs: list[Any]) -> Any:
        integers = self._integers
        recorded = self._recorded.get(tuple([inputs[index] for index in integers]) if integers else ())
        if recorded is not None:
            return recorded(inputs)
        return self._first_call(inputs)

    def forget(self) -> None:
        """Drop everything recorded; the next call records again, with the manager there is then."""
        self._recorded.clear()

    def _first_call(self, inputs: list[Any]) -> Any:
        trees = torch_internals.cudagraph_trees
        self._integers = [index for index, value in enumerate(inputs) if isinstance(value, int)]
        key = tuple(inputs[index] for index in self._integers)
        checked = trees.get_input_idxs_to_check(inputs, self._static_input_idxs)
        mutated = trees.OrderedSet(self._mutated_input_idxs)
        aligned = trees.align_inputs_from_check_idxs(self._model, checked, mutated)
        sizes = key[0] if len(key) == 1 else key or None  # as the user writes them in `cudagraph_capture_sizes`
        if not trees.is_cudagraph_capture_sizes(sizes):
            return aligned(inputs)
        if not self._warned:
            self._warned = trees.maybe_warning_due_to_dynamic_shape(self._recorded, sizes)
        static = trees.remove_unaligned_input_idxs(inputs, self._static_input_idxs)
        self._recorded[key], outputs = self._record(
            self._capturable(aligned),
            inputs,
            static,
            mutated_input_idxs=self._mutated_input_idxs,
            compile_id=self._compile_id,
            **self._keywords,
        )
        return outputs


_LIVE: weakref.WeakSet[CapturedFunction] = weakref.WeakSet()


def forget_recordings(functions: Iterable[CapturedFunction] | None = None) -> None:
    """Let these functions, by default all there are, drop what they recorded."""
    for function in list(_LIVE if functions is None else functions):
        function.forget()
