"""Describe a function of Inductor's that a manager records, with its state, decisions and report."""

from __future__ import annotations

import functools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from optimizations import torch_internals
from optimizations.calls.turns import lending
from optimizations.graph.plan import Choice
from optimizations.in_place.budget import most_calls_between
from optimizations.in_place.generated import GeneratedCode, read_generated
from optimizations.in_place.session import Session
from optimizations.options import Options
from optimizations.report.recordings import CountedCalls, Direction, KeptResults, RecordingReport, SelectionReport
from optimizations.selection import Decision, copies_cost_more, without_graph
from optimizations.torch_internals.geometry import FixedGeometry
from optimizations.trees.streams import follow_streams

NO_GRAPH = "no graph was recorded yet"

TRIED_WITHOUT_GRAPH = "selection: measured without a graph"


class Recording(Protocol):
    """Define the part of a `node.EncoreNode` that its function uses."""

    session: Session | None
    replays: int
    copied_per_replay: int

    @property
    def function(self) -> RecordableFunction: ...

    @property
    def result_bytes(self) -> int: ...

    def describe(self) -> RecordingReport: ...

    def copy_inputs(self, copying: bool) -> None: ...

    def short_of_memory(self) -> str | None: ...


class RecordableFunction:
    """Hold a function of Inductor's that a manager records. It is called with the list of its inputs and empties it.

    It also collects the report of the function (`report.ReportedFunction`).

    Args:
        run: the function, which aligns its inputs first.
        generated: the function as Inductor generated it.
        options: the user's options.
        direction: the function's direction.
        code: returns the facts from the source of `generated`.
        device_index: the CUDA device of its graphs.

    Attributes:
        kept_outputs: positions of results that the program keeps; they are copied out of graph memory.
        returned_inputs: for each position of a result that is an input, that input; only inputs that stock copies.
        callers_get: positions of a forward's results that callers get; the others are saved for its backward. None if
            they may get all.
        ordinary_inputs: former parameters that moved; they are copied or read in place as other inputs are.
        calls_on_a_path: calls of it in one iteration, as far as graphs were recorded.
        written_inputs: inputs other than parameters that it writes in the caller's memory. Note [Inputs that are
            written].
        callers: the threads that call functions of its manager.
        without_graph: why the function runs without a graph; None if it has one.
        failed_recordings: how many of its recordings failed.
        copies_inputs: whether recordings copy all their inputs, as stock does.
        not_followed: why addresses in its graphs are no longer updated; None while they are.
        records_on_inputs: whether recordings may omit placeholders. Note [Inputs without a placeholder].
        is_retired: whether its manager has freed unused graphs since `without_graph` was set.
        decision: the chosen alternative for all further calls, by rule or by measurement; None while undecided. `why`
            gives the reason.
        median_us: measured time by alternative.
        replace_call: replaces the callable that runs its calls; None before its first call.
        turn: the lock that calls of its manager's functions hold; None before its first call.
        geometry: the geometry of inputs at fixed addresses at its first call; None before that.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], Any],
        generated: Callable[[list[Any]], Any],
        options: Options,
        direction: Direction,
        code: Callable[[], GeneratedCode],
        device_index: int,
    ) -> None:
        self.run = run
        self.generated = generated
        self.code = code
        self.device_index = device_index
        self.options = options
        self.direction: Direction = direction
        self.kept_outputs: set[int] = set()
        self.returned_inputs: dict[int, int] = {}
        self.callers_get: frozenset[int] | None = None
        self.written_inputs: Sequence[int] = ()
        self.ordinary_inputs: set[int] = set()
        self.kept_copies = 0
        self.kept_bytes = 0
        self.without_graph: str | None = None
        self.callers: set[int] = set()
        self.failed_recordings = 0
        self.copies_inputs = False
        self.not_followed: str | None = None
        self.records_on_inputs = options.indirection != Choice.PRELUDE and options.selection != "measure"
        self.is_retired = False
        self.decision: Decision | None = None
        self.why = ""
        self.median_us: Mapping[str, float] = {}
        self.replace_call: Callable[[Callable[[list[Any]], Any]], None] | None = None
        self.turn: AbstractContextManager[Any] | None = None
        self.geometry: FixedGeometry | None = None
        self.calls_on_a_path = 1
        self._misfits = 0, 0
        self._replays_before: weakref.WeakKeyDictionary[Recording, int] = weakref.WeakKeyDictionary()
        self._uncaptured: Counter[str] = Counter()
        self._slow_calls: Counter[str] = Counter()
        self._recordings: list[tuple[weakref.ref[Recording], list[RecordingReport]]] = []

    def __call__(self, inputs: list[Any]) -> Any:
        if self.turn is None:
            return self.run(inputs)
        with lending(self.turn):  # Note [Backwards inside of functions] in `calls.turns`
            return self.run(inputs)

    @functools.cached_property
    def is_one_of_several(self) -> bool:
        """Return whether it is one of several partitions of a program."""
        return is_one_of_several(self.generated)

    def note_returned_inputs(self, returned: Mapping[int, int]) -> None:
        """Note the copied inputs whose memory a recording returns, by position among the results."""
        if self.is_one_of_several:
            self.returned_inputs = {place: index for place, index in returned.items() if self.code().returns(index)}

    # Selection

    @property
    def _follows_rules(self) -> bool:
        """Return whether rules may drop its graph: only inference has no backward that would need its memory."""
        return self.options.selection == "rule" and self.direction == "inference"

    def decide_before_recording(self) -> None:
        """Decide before the first recording whether the function runs without a graph."""
        if self._follows_rules and (why := without_graph(self.code().kernels)) is not None:
            self.decide("no graph", why)

    def keeps_graph_for_results(self, result_bytes: int) -> bool:
        """Decide whether a function that is small enough to run without a graph needs one for its results' size."""
        read_later = result_bytes if self.hands_results_on else 0
        if self._follows_rules and without_graph(self.code().kernels, read_later) is None:
            self.decision = self.without_graph = None
            return True
        return False

    def plan_is_there(self, node: Recording) -> None:
        """Decide whether the function keeps its graph, now that the copied inputs are final.

        A function with collectives keeps it: all processes must capture a collective or none, and their plans differ.
        """
        decided = self.decision is not None or self.without_graph is not None
        if decided or not self._follows_rules or self.code().collective:
            return
        read = node.session.kernels if node.session is not None else None
        kernels = read if read is not None else self.code().kernels
        why = copies_cost_more(node.copied_per_replay, kernels, node.result_bytes if self.hands_results_on else 0)
        if why is not None and node.short_of_memory() is None:
            self.decide("no graph", why)

    @functools.cached_property
    def hands_results_on(self) -> bool:
        """Return whether a later partition of the same program may read its results."""
        plain = getattr(self.generated, "__func__", self.generated)
        number = re.fullmatch(r"partition_(\d+)", getattr(plain, "__name__", ""))
        if not self.is_one_of_several or number is None:
            return self.is_one_of_several
        return f"partition_{int(number[1]) + 1}" in plain.__globals__

    def decide(self, decision: Decision, why: str) -> None:
        """Choose how all further calls run."""
        self.decision, self.why = decision, why
        if decision == "no graph":
            self.without_graph = f"selection: {why}"

    def run_past_manager(self, inputs: list[Any]) -> Any:
        """Run a call of an inference without a graph and without its manager."""
        self._count_uncaptured(self.without_graph or TRIED_WITHOUT_GRAPH)
        follow_streams(self.device_index)
        return self.run(inputs)

    def copy_inputs(self, copying: bool) -> None:
        """Switch replays between copying all inputs and reading some in place. Needs the manager's lock."""
        self.copies_inputs = copying
        for node in self._alive():
            node.copy_inputs(copying)

    @property
    def waiting(self) -> str | None:
        """Return why its graphs may still change; None if they are final."""
        nodes = self._alive()
        replays = sum(one.replays for one in nodes)
        sessions = (one.session for one in nodes if not self.is_idle(one, replays))
        return next((one.waiting for one in sessions if one is not None and one.pending), None) if nodes else NO_GRAPH

    def short_of_memory(self) -> str | None:
        """Return why calls should not be tried without a graph if memory is short, else None."""
        nodes = self._alive()  # in one pool
        return nodes[0].short_of_memory() if nodes else None

    def replays(self) -> int:
        """Return the number of replays of all its recordings."""
        return sum(one.replays for one in self._alive())

    def is_seldom(self, node: Recording) -> bool:
        """Note a replay of a recording. Return whether too many replays of others came since its previous one."""
        replays = self.replays()
        seldom = self.is_idle(node, replays)
        self._replays_before[node] = replays
        return seldom

    def is_idle(self, node: Recording, replays: int) -> bool:
        """Return whether a recording is outdated: others were replayed many times since its own last replay.

        The first steps of a program may leave a recording that fits no later step. `replays` is the sum over all its
        recordings. A caller that checks many of them computes it once: a function may have hundreds.
        """
        before = self._replays_before.setdefault(node, replays)
        return replays - before > most_calls_between(len(self._recordings))

    def _alive(self) -> list[Recording]:
        return [node for reference, last in list(self._recordings) if not last and (node := reference()) is not None]

    def selection(self) -> SelectionReport | None:
        """See `report.ReportedFunction`."""
        if self.options.selection == "off":
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
        """Callback: `node` was recorded."""
        self._recordings.append((weakref.ref(node), []))

    def recorded_on(self, path: Iterable[Recording]) -> None:
        """Callback: the last recording of this path was made for it."""
        if self.written_inputs:
            self.calls_on_a_path = max(self.calls_on_a_path, sum(1 for one in path if one.function is self))

    def recorded_now(self) -> int:
        """Return the number of its live recordings."""
        return len(self._alive())

    def misfits_in_a_row(self) -> int:
        """Count a call that fits no recording and is not recorded. Return their number since the last replay."""
        replays = self.replays()
        known, misfits = self._misfits
        self._misfits = replays, misfits + 1 if replays == known else 1
        return self._misfits[1]

    def useless_recordings(self) -> int:
        """Return the number of recordings made since the last one that was ever replayed."""
        made = 0
        for reference, last in reversed(self._recordings):
            node = reference()
            if (node is not None and node.replays > 0) or any(report.replays for report in last):
                break
            made += 1
        return made

    def last_seen(self, node: Recording) -> None:
        """Callback: a recording is about to be freed. Keep its report."""
        for reference, last in self._recordings:
            if reference() is node:
                last[:] = [node.describe()]

    def ran_without_graph(self, reason: str) -> None:
        """Count a call without a graph. `TORCH_LOGS=cudagraphs` shows the first for each reason."""
        self._count_uncaptured(reason)
        if self.decision == "no graph" and self.is_retired and self.direction == "inference" and self.replace_call:
            self.replace_call(self.run_past_manager)

    def _count_uncaptured(self, reason: str) -> None:
        self._uncaptured[reason] += 1
        if self._uncaptured[reason] == 1:
            torch_internals.cudagraph_utils.cudagraphs_log.debug("skipping cudagraphs due to %s", reason)

    def took_the_slow_path(self, reason: str) -> None:
        """Callback: a call took the slow path."""
        self._slow_calls[reason] += 1

    def recordings(self) -> Sequence[RecordingReport]:
        """See `report.ReportedFunction`. Other threads may call the function meanwhile."""
        found: list[RecordingReport] = []
        for reference, last in list(self._recordings):
            node = reference()
            try:
                found += last or ([node.describe()] if node is not None else [])
            except ReferenceError:  # another thread released it meanwhile
                found += last
        return found

    def kept(self) -> KeptResults | None:
        """See `report.ReportedFunction`."""
        if not self.kept_outputs:
            return None
        return KeptResults(self.direction, tuple(sorted(self.kept_outputs)), self.kept_copies, self.kept_bytes)

    def uncaptured(self) -> Sequence[CountedCalls]:
        """See `report.ReportedFunction`."""
        return [CountedCalls(self.direction, reason, calls) for reason, calls in list(self._uncaptured.items())]

    def slow_calls(self) -> Sequence[CountedCalls]:
        """See `report.ReportedFunction`."""
        return [CountedCalls(self.direction, reason, calls) for reason, calls in list(self._slow_calls.items())]


def is_one_of_several(generated: Callable[[list[Any]], Any]) -> bool:
    """Return whether a function of Inductor's is one of several partitions of a program."""
    plain = getattr(generated, "__func__", generated)
    return "partition_1" in getattr(plain, "__globals__", {})


def reading(generated: Callable[[list[Any]], Any]) -> Callable[[], GeneratedCode]:
    """Return a function that reads the source of a generated function once, on its first call."""
    return functools.cache(lambda: read_generated(generated))
