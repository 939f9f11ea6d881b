"""Describe a function of Inductor's that a manager records, with its state, decisions and report."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from optimizations import torch_internals
from optimizations.calls.turns import run_under
from optimizations.concurrency.launch_log import SWITCHED_OFF
from optimizations.graph.plan import Choice
from optimizations.in_place.budget import most_calls_between
from optimizations.in_place.generated import GeneratedCode
from optimizations.in_place.session import Stage
from optimizations.options import Options
from optimizations.report.recordings import CountedCalls, Direction, KeptResults, RecordingReport, SelectionReport
from optimizations.selection import Decision, copies_cost_more, without_graph
from optimizations.torch_internals.geometry import FixedGeometry
from optimizations.trees.reasons import RUNS_BACKWARD
from optimizations.trees.streams import follow_streams

NO_GRAPH = "no graph was recorded yet"

TRIED_WITHOUT_GRAPH = "selection: measured without a graph"


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
        replace_call: called with this function and the callable that runs its calls from now on.

    Attributes:
        kept_outputs: positions of results that the program keeps; they are copied out of graph memory.
        callers_get: positions of a forward's results that callers get; the others are saved for its backward. None if
            they may get all.
        ordinary_inputs: former parameters that moved; they are copied or read in place as other inputs are.
        written_inputs: inputs other than parameters that it writes in the caller's memory. Note [Inputs that are
            written].
        callers: the threads that call functions of its manager.
        without_graph: why the function runs without a graph; None if it has one.
        failed_recordings: how many of its recordings failed.
        copies_inputs: whether recordings copy all their inputs, as stock does.
        not_followed: why addresses in its graphs are no longer updated; None while they are.
        records_on_inputs: whether recordings may omit placeholders. Note [Inputs without a placeholder].
        chain: why its graphs stay chains of kernels; None while they may get branches.
        is_retired: whether its manager has freed unused graphs since `without_graph` was set.
        decision: the chosen alternative for all further calls, by rule or by measurement; None while undecided. `why`
            gives the reason.
        median_us: measured time by alternative.
        turn: the lock that calls of its manager's functions hold; None before its first call.
        geometry: the geometry of inputs at fixed addresses at its first call, or at that for another size; None before.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], Any],
        generated: Callable[[list[Any]], Any],
        options: Options,
        direction: Direction,
        code: Callable[[], GeneratedCode],
        device_index: int,
        replace_call: Callable[[RecordableFunction, Callable[[list[Any]], Any]], None],
    ) -> None:
        self.run = run
        self.generated = generated
        self.code = code
        self.device_index = device_index
        self.replace_call = replace_call
        self.options = options
        self.direction: Direction = direction
        self.kept_outputs: set[int] = set()
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
        self.chain = SWITCHED_OFF if options.concurrency == "off" else None
        self.is_retired = False
        self.decision: Decision | None = None
        self.why = ""
        self.median_us: Mapping[str, float] = {}
        self.turn: AbstractContextManager[Any] | None = None
        self.geometry: FixedGeometry | None = None
        self._misfits = 0, 0
        self._pending_inside = 0  # forwards that ran inside of the call in progress and wait for their backwards
        self._uncaptured: Counter[str] = Counter()
        self._slow_calls: Counter[str] = Counter()
        self._recordings: list[weakref.ref[Any]] = []  # of `node.EncoreNode`s
        self._freed: list[RecordingReport] = []

    def __call__(self, inputs: list[Any]) -> Any:
        if self.turn is None:
            return self.run(inputs)
        self._pending_inside = 0
        return run_under(self, inputs)

    def runs_inside(self, direction: Direction) -> None:
        """Callback: an operator in this function calls another one.

        The backward of a forward from before fills gradients that no schema names, and a replay would fill them again.
        """
        self._pending_inside += {"forward": 1, "backward": -1, "inference": 0}[direction]
        if self._pending_inside < 0 and not self.code().collective:
            self.without_graph = self.without_graph or RUNS_BACKWARD

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
        read_later = result_bytes if self.code().hands_results_on else 0
        if self._follows_rules and without_graph(self.code().kernels, read_later) is None:
            self.decision = self.without_graph = None
            return True
        return False

    def plan_is_there(self, node: Any) -> None:
        """Decide whether the function keeps its graph, once the copied inputs of its recording `node` are final.

        A function with collectives keeps it: all processes must capture a collective or none, and their plans differ.
        """
        session = node.session  # another thread may release it at any time
        if session is None or session.stage is not Stage.DONE or not self._follows_rules or self.code().collective:
            return
        if self.decision is not None or self.without_graph is not None:
            return
        kernels = session.kernels if session.kernels is not None else self.code().kernels
        why = copies_cost_more(
            node.copied_per_replay, kernels, node.result_bytes if self.code().hands_results_on else 0
        )
        if why is not None and node.short_of_memory() is None:
            self.decide("no graph", why)

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
        """Let replays copy all inputs, or read some in place, from each recording's next slow call on."""
        if copying is not self.copies_inputs:
            self.copies_inputs = copying
            for node in self.nodes():
                node.takes_fast_path = False

    @property
    def waiting(self) -> str | None:
        """Return why its graphs may still change; None if they are final."""
        nodes, replays = self.nodes(), self.replays()
        sessions = (one.session for one in nodes if not self.is_idle(one, replays))
        return next((one.waiting for one in sessions if one is not None and one.pending), None) if nodes else NO_GRAPH

    def replays(self) -> int:
        """Return the number of replays of all its recordings."""
        return sum(one.replays for one in self.nodes())

    def is_idle(self, node: Any, replays: int) -> bool:
        """Return whether a recording is outdated: others were replayed many times since its own last replay.

        The first steps of a program may leave a recording that fits no later step. `replays` is the sum over all its
        recordings. A caller that checks many of them computes it once: a function may have hundreds.
        """
        return replays - node.replayed_at > most_calls_between(len(self._recordings) + len(self._freed))

    def nodes(self) -> list[Any]:
        return [node for reference in list(self._recordings) if (node := reference()) is not None]

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

    def recorded(self, node: Any) -> None:
        """Callback: `node` was recorded."""
        node.replayed_at = self.replays()
        self._recordings.append(weakref.ref(node))

    def freed(self, node: Any) -> None:
        """Callback: a recording is about to be freed. Keep its report."""
        self._freed.append(node.describe())
        self._recordings.remove(weakref.ref(node))

    def misfits_in_a_row(self) -> int:
        """Count a call that fits no recording and is not recorded. Return their number since the last replay."""
        replays = self.replays()
        known, misfits = self._misfits
        self._misfits = replays, misfits + 1 if replays == known else 1
        return self._misfits[1]

    def useless_recordings(self) -> int:
        """Return the number of recordings made since the last one that was ever replayed."""
        made: list[Any] = [*self._freed, *self.nodes()]
        return next((count for count, one in enumerate(reversed(made)) if one.replays), len(made))

    def ran_without_graph(self, reason: str) -> None:
        """Count a call without a graph. `TORCH_LOGS=cudagraphs` shows the first for each reason."""
        self._count_uncaptured(reason)
        if self.decision == "no graph" and self.is_retired and self.direction == "inference":
            self.replace_call(self, self.run_past_manager)

    def _count_uncaptured(self, reason: str) -> None:
        self._uncaptured[reason] += 1
        if self._uncaptured[reason] == 1:
            torch_internals.cudagraph_utils.cudagraphs_log.debug("skipping cudagraphs due to %s", reason)

    def took_the_slow_path(self, reason: str) -> None:
        """Callback: a call took the slow path."""
        self._slow_calls[reason] += 1

    def recordings(self) -> Sequence[RecordingReport]:
        """See `report.ReportedFunction`. Other threads may call the function meanwhile."""
        found = []
        for node in self.nodes():
            with contextlib.suppress(ReferenceError):  # another thread released it meanwhile
                found.append(node.describe())
        return [*self._freed, *found]

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
