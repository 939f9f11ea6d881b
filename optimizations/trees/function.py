"""The function Inductor calls where stock would call its CUDA-graphed one.

It does what `torch._inductor.cudagraph_trees.cudagraphify_impl` does (one recording per value of the integer inputs)
with two differences. Recordings are made by Encore's managers. And inputs that Inductor wants aligned are aligned where
the function is really run, in warm-up and without a graph, instead of before each replay: a replay aligns what it reads
in place itself, and what it copies needs no alignment. A mutated input that was copied for that is written back.

Note [Inputs that are written]. Stock leaves a function without a graph that writes an input which is neither a
parameter nor a result of another graph: a key-value cache that the program passes, say. A graph would write its copy.
Here such an input is taken for one at a fixed address, as parameters are: the graph writes the caller's memory, and
where the next call passes another tensor, it is recorded again or patched (`in_place.patched_inputs`). Not so in
backwards and in programs of several partitions, whose inputs may be at new addresses in each call; where Inductor does
not say that it is written (`GeneratedCode.written`); with collectives, whose ranks may pass buffers apart; and for more
than a few values of integer inputs: a place in a cache that is passed as a number is another one in each call.
"""

from __future__ import annotations

import functools
import re
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from optimizations import torch_internals
from optimizations.calls.turns import lending
from optimizations.concurrency.noted_capture import Concurrency
from optimizations.graph.plan import Choice
from optimizations.in_place.budget import most_calls_between
from optimizations.in_place.generated import GeneratedCode, read_generated
from optimizations.report.recordings import Direction, FullWay, KeptResults, RecordingReport, UncapturedCalls
from optimizations.report.selection import SelectionReport
from optimizations.selection import (
    Decision,
    GeneratedFunction,
    PlannedGraph,
    Selection,
    copies_cost_more,
    without_graph,
)
from optimizations.torch_internals.geometry import FixedGeometry
from optimizations.trees.aligned import on_aligned_inputs
from optimizations.trees.measured import Measured
from optimizations.weak_registry import WeakRegistry

NO_GRAPH = "no graph was recorded yet"

MOST_SIZES_OF_WRITERS = 8
"""Values of the integer inputs for which a function that writes an input is recorded. Stock records none."""

TRIED_WITHOUT_GRAPH = "selection: measured without a graph"


class Recording(Protocol):
    """A node, as long as it lives.

    Attributes:
        replays: how often it was replayed for a call.
        recording_s: how long recording it took, in seconds.
        function: whose recording it is.
        copied_per_replay: bytes that the next replay copies into placeholders.
    """

    replays: int
    recording_s: float
    copied_per_replay: int

    @property
    def function(self) -> RecordableFunction: ...

    @property
    def kernels(self) -> int | None:
        """Kernels of its graph; None where it was not read."""

    @property
    def result_bytes(self) -> int:
        """Size of its results."""

    def describe(self) -> RecordingReport: ...

    def copy_inputs(self, copying: bool) -> None:
        """Let replays copy all inputs, as stock does, instead of reading some in place. Under the manager's turn."""

    def short_of_memory(self) -> str | None:
        """Why a call should not be tried without the graph: memory is short. None where it may be."""

    def let_another_serve(self) -> None:
        """To be told when another one of its function was replayed."""

    @property
    def in_place(self) -> bool:
        """Whether it can read an input in place that stock copies."""

    @property
    def waiting(self) -> str | None:
        """Why it is not as it will stay yet; None where it is."""


class WarmUp:
    """Runs a function once, in the place of `run`.

    Attributes:
        began: whether the function was called.
        results: what it returned; None as long as it has not.
    """

    def __init__(self, run: Callable[[list[Any]], Any]) -> None:
        self.run = run
        self.began = False
        self.results: Any = None

    def __call__(self, inputs: list[Any]) -> Any:
        self.began = True
        self.results = self.run(inputs)
        return self.results


class RecordableFunction:
    """What a manager records: a function of Inductor's, called with the list of its inputs, which it empties.

    It also keeps what is reported of the function. `report.ReportedFunction`.

    Args:
        run: the function, its inputs aligned first.
        generated: the function as Inductor generated it.
        choice, lean, selection_mode, concurrency: the user's options.
        code: gives what is known of `generated`; read from its source where None.

    Attributes:
        kept_outputs: places of results that the program was found to keep; they are copied out of graph memory.
        returned_inputs: by place among the results: the input that it is, for inputs that stock copies.
        callers_get: places of the results that callers get, of a forward; the others are saved for its backward. None
            where they may get all.
        ordinary_inputs: former parameters that moved; they are copied and read in place as other inputs are.
        calls_on_a_path: how often it is called in an iteration, as far as graphs were recorded.
        written_inputs: inputs that it writes where the caller has them, and that are no parameters. Note [Inputs that
            are written].
        callers: the threads that call functions of its manager.
        without_graph: why the function runs without a graph; None where it does not.
        copies_inputs: whether recordings copy all their inputs, as stock does.
        not_followed: why addresses in its graphs are not changed any more; None where they may be.
        records_on_inputs: whether recordings may leave placeholders out. Note [Inputs without a placeholder].
        retired: whether it is never served by a graph again; `retiring` until its manager has freed what it can.
        decision: how its calls are served from now on, by rule or by measurement; None where that is not decided. `why`
            gives the reason.
        median_us: measured time by alternative.
        serve_by: replaces what is called for it; None before its first call.
        latest: the recording that was replayed last.
        turn: held by whoever calls functions of its manager; None until one has it.
        follow_streams: see `GraphedFunction`.
        geometry: of inputs at fixed addresses, as the function was compiled for it; None before its first call.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], Any],
        generated: Callable[[list[Any]], Any],
        choice: Choice,
        direction: Direction,
        *,
        lean: bool = True,
        selection_mode: Selection = "off",
        concurrency: Concurrency = "off",
        code: Callable[[], GeneratedCode] | None = None,
    ) -> None:
        self.run = run
        self.generated = generated
        self._read_code = code or reading(generated)
        self.choice = choice
        self.lean = lean
        self.selection_mode: Selection = selection_mode
        self.concurrency: Concurrency = concurrency
        self.direction = direction
        self.kept_outputs: set[int] = set()
        self.returned_inputs: dict[int, int] = {}
        self.callers_get: frozenset[int] | None = None
        self.written_inputs: Sequence[int] = ()
        self.ordinary_inputs: set[int] = set()
        self.kept_copies = 0
        self.kept_bytes = 0
        self.without_graph: str | None = None
        self.callers: set[int] = set()
        self.copies_inputs = False
        self.not_followed: str | None = None
        self.records_on_inputs = choice in (Choice.HOST, Choice.AUTO) and selection_mode != "measure"
        self.retired = self.retiring = False
        self.decision: Decision | None = None
        self.why = ""
        self.median_us: Mapping[str, float] = {}
        self.serve_by: Callable[[Callable[[list[Any]], Any]], None] | None = None
        self.turn: AbstractContextManager[Any] | None = None
        self.latest: weakref.ref[Recording] | None = None
        self.geometry: FixedGeometry | None = None
        self.follow_streams: Callable[[], None] = lambda: None
        self.calls_on_a_path = 1
        self._misfits = 0, 0
        self._replays_before: weakref.WeakKeyDictionary[Recording, int] = weakref.WeakKeyDictionary()
        self._uncaptured: Counter[str] = Counter()
        self._full_ways: Counter[str] = Counter()
        self._recordings: list[tuple[weakref.ref[Recording], list[RecordingReport]]] = []

    def __call__(self, inputs: list[Any]) -> Any:
        if self.turn is None:
            return self.run(inputs)
        with lending(self.turn):  # Note [Backwards inside of functions] in `calls.turns`
            return self.run(inputs)

    @functools.cached_property
    def is_one_of_several(self) -> bool:
        """Whether it is a partition of a program that has more of them."""
        return is_one_of_several(self.generated)

    def note_returned_inputs(self, returned: Mapping[int, int]) -> None:
        """Note the copied inputs whose memory a recording returns, by place among the results."""
        if self.is_one_of_several:
            self.returned_inputs = {place: index for place, index in returned.items() if self.code().returns(index)}

    def code(self) -> GeneratedCode:
        """What is known of the generated function, from its source."""
        return self._read_code()

    # Selection

    def goes_without_graph(self) -> bool:
        """Decide before the first recording whether the function runs without a graph."""
        if self.selection_mode == "rule":
            why = without_graph(self._generated_function(self.code().kernels, 0))
            if why is not None:
                self.decide("no graph", why)
        return self.decision == "no graph"

    def keeps_graph_for_results(self, result_bytes: int) -> bool:
        """Decide again for a function that is small enough to run without a graph, now that its results are known."""
        small = without_graph(self._generated_function(self.code().kernels, result_bytes)) is not None
        if self.selection_mode == "rule" and not small:
            self.decision = self.without_graph = None
            self.retired = self.retiring = False
            return True
        return False

    def plan_is_there(self, node: Recording) -> None:
        """Decide whether the function keeps its graph, now that it is known what the graph copies."""
        if self.selection_mode != "rule" or self.decision is not None or self.without_graph is not None:
            return
        kernels = node.kernels if node.kernels is not None else self.code().kernels
        generated = self._generated_function(kernels, node.result_bytes)
        why = copies_cost_more(PlannedGraph(generated, node.copied_per_replay, self.code().collective))
        if why is not None and node.short_of_memory() is None:
            self.decide("no graph", why)

    def _generated_function(self, kernels: int | None, result_bytes: int) -> GeneratedFunction:
        return GeneratedFunction(self.direction == "inference", kernels, result_bytes if self.hands_results_on else 0)

    @functools.cached_property
    def hands_results_on(self) -> bool:
        """Return whether a later partition of the same program may read its results."""
        plain = getattr(self.generated, "__func__", self.generated)
        number = re.fullmatch(r"partition_(\d+)", getattr(plain, "__name__", ""))
        if not self.is_one_of_several or number is None:
            return self.is_one_of_several
        return f"partition_{int(number[1]) + 1}" in plain.__globals__

    def decide(self, decision: Decision, why: str) -> None:
        """Serve all further calls like this."""
        self.decision, self.why = decision, why
        if decision == "no graph":
            self.without_graph = f"selection: {why}"
            self.retire()

    def retire(self) -> None:
        """No call is served by a graph any more: what its graphs hold may be freed."""
        self.retired = self.retiring = True

    def run_past_manager(self, inputs: list[Any]) -> Any:
        """Serve a call of an inference without a graph. The manager need not know of it."""
        self._count_uncaptured(self.without_graph or TRIED_WITHOUT_GRAPH)
        self.follow_streams()
        return self.run(inputs)

    def copy_inputs(self, copying: bool) -> None:
        """Let replays copy all inputs, as stock does, instead of reading some in place. Under the manager's turn."""
        self.copies_inputs = copying
        for node in self._alive():
            node.copy_inputs(copying)

    @property
    def waiting(self) -> str | None:
        """Why its graphs are not as they will stay yet; None where they are."""
        nodes = self._alive()
        replays = sum(one.replays for one in nodes)
        pending = (one.waiting for one in nodes if one.waiting and not self.is_idle(one, replays))
        return next(pending, None) if nodes else NO_GRAPH

    @property
    def in_place(self) -> bool:
        """Return whether a graph of it can read an input in place that stock copies."""
        return any(node.in_place for node in self._alive())

    def short_of_memory(self) -> str | None:
        """Return why calls should not be tried without a graph: memory is short. None where they may be."""
        nodes = self._alive()  # in one pool
        return nodes[0].short_of_memory() if nodes else None

    def replays(self) -> int:
        """Of all its recordings."""
        return sum(one.replays for one in self._alive())

    def is_seldom(self, node: Recording) -> bool:
        """Note a replay of a recording. Return whether others were replayed too often since the one before."""
        replays = self.replays()
        seldom = self.is_idle(node, replays)
        self._replays_before[node] = replays
        return seldom

    def is_idle(self, node: Recording, replays: int) -> bool:
        """Return whether others were replayed so often since this recording was that it need not be waited for.

        Of the first steps of a program a recording may be left that fits no later one. `replays` are those of all its
        recordings. Who asks about many adds them up once: a function may have hundreds.
        """
        before = self._replays_before.setdefault(node, replays)
        return replays - before > most_calls_between(len(self._recordings))

    def _alive(self) -> list[Recording]:
        return [node for reference, last in list(self._recordings) if not last and (node := reference()) is not None]

    def selection(self) -> SelectionReport | None:
        """See `report.ReportedFunction`."""
        if self.selection_mode == "off":
            return None
        recordings = self.recordings()
        last = recordings[-1] if recordings else None
        in_place = [one for one in last.inputs if one.indirect] if last is not None else []
        decision, why = self.decision, self.why
        if decision is None and self.without_graph is not None:
            why = self.without_graph
        elif decision is None:
            why = self.waiting or f"{len(in_place)} inputs are cheaper to read in place than to copy"
            decision = None if self.waiting else "in place" if in_place else "copies"
        return SelectionReport(
            direction=self.direction,
            decision=decision,
            why=why,
            kernels=last.kernels if last is not None and last.kernels is not None else self.code().kernels,
            copied_bytes=last.copied_bytes if last is not None else None,
            nodes=sum(one.nodes for one in in_place),
            median_us=tuple(self.median_us.items()),
        )

    def recorded(self, node: Recording) -> None:
        """To be told of each recording."""
        self._recordings.append((weakref.ref(node), []))

    def recorded_on(self, path: Iterable[Recording]) -> None:
        """To be told of the path of each recording of it, with that one."""
        if self.written_inputs:
            self.calls_on_a_path = max(self.calls_on_a_path, sum(1 for one in path if one.function is self))

    def recorded_now(self) -> int:
        """How many recordings of it there are."""
        return len(self._alive())

    def misfits_in_a_row(self) -> int:
        """To be told of a call that fits no recording, and none is made for: how many there were without a replay."""
        replays = self.replays()
        known, misfits = self._misfits
        self._misfits = replays, misfits + 1 if replays == known else 1
        return self._misfits[1]

    def recorded_in_vain(self) -> int:
        """Recordings made since the last one that was ever replayed."""
        made = 0
        for reference, last in reversed(self._recordings):
            node = reference()
            if (node is not None and node.replays > 0) or any(report.replays for report in last):
                break
            made += 1
        return made

    def last_seen(self, node: Recording) -> None:
        """To be told before a recording goes: its report stays."""
        for reference, last in self._recordings:
            if reference() is node:
                last[:] = [node.describe()]

    def session_failed(self, reason: str) -> None:
        """To be told where a recording stays as stock made it because of a defect of Encore's."""
        warnings.warn(f"Encore leaves a CUDA graph as it is; {reason}. This is a defect of Encore.", stacklevel=2)

    def ran_without_graph(self, reason: str) -> None:
        """Count a call without a graph. `TORCH_LOGS=cudagraphs` shows the first for each reason."""
        self._count_uncaptured(reason)
        freed = self.decision == "no graph" and not self.retiring
        if freed and self.direction == "inference" and self.serve_by is not None:
            self.serve_by(self.run_past_manager)

    def _count_uncaptured(self, reason: str) -> None:
        self._uncaptured[reason] += 1
        if self._uncaptured[reason] == 1:
            torch_internals.cudagraph_utils.cudagraphs_log.debug("skipping cudagraphs due to %s", reason)

    def went_the_full_way(self, reason: str) -> None:
        """Is told of each call that was not steady."""
        self._full_ways[reason] += 1

    def recordings(self) -> Sequence[RecordingReport]:
        """See `report.ReportedFunction`. Other threads may call the function meanwhile."""
        found: list[RecordingReport] = []
        for reference, last in list(self._recordings):
            node = reference()
            try:
                found += last or ([node.describe()] if node is not None else [])
            except ReferenceError:  # another thread let go of it just now
                found += last
        return found

    def kept(self) -> KeptResults | None:
        """See `report.ReportedFunction`."""
        if not self.kept_outputs:
            return None
        return KeptResults(self.direction, tuple(sorted(self.kept_outputs)), self.kept_copies, self.kept_bytes)

    def uncaptured(self) -> Sequence[UncapturedCalls]:
        """See `report.ReportedFunction`."""
        return [UncapturedCalls(self.direction, reason, calls) for reason, calls in list(self._uncaptured.items())]

    def full_ways(self) -> Sequence[FullWay]:
        """See `report.ReportedFunction`."""
        return [FullWay(self.direction, reason, calls) for reason, calls in list(self._full_ways.items())]


Record = Callable[..., tuple[Callable[[list[Any]], Any] | None, Any]]
"""`torch._inductor.cudagraph_trees.cudagraphify` with Encore's managers: what to call from now on (None: nothing was
recorded), and a result."""


def is_one_of_several(generated: Callable[[list[Any]], Any]) -> bool:
    """Return whether a function of Inductor's is a partition of a program that has more of them."""
    plain = getattr(generated, "__func__", generated)
    return "partition_1" in getattr(plain, "__globals__", {})


def reading(generated: Callable[[list[Any]], Any]) -> Callable[[], GeneratedCode]:
    """What gives what is known of a function that Inductor generated. Its source is read once, when first asked."""
    return functools.cache(lambda: read_generated(generated))


class GraphedFunction:
    """A function that is warmed up, recorded and replayed; called with the list of its inputs, which it empties.

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
        """Note [Inputs that are written]."""
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
