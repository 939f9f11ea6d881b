"""Indirection of one recording: from two captures to a graph whose inputs are read in place.

`IndirectRecording` is used in three steps, by the node that records:

1. created with the inputs that may be indirected, it gives each a placeholder outside of the pool and captures the
   function once at other addresses (the scout);
2. the node records as stock does, with these placeholders;
3. `complete` compares the two graphs, plans, proves the plan by its outcome, carries it out on the recorded graph and
   instantiates that.

Note [Doubt]. Whatever goes wrong before the recorded graph is changed (no memory, a call that fails, an outcome that
differs) costs indirection, of one input or of all, and is a reason in the report. Clones are what is tried out on, so
the recorded graph is as stock's until a plan is proven. A plan with `prelude` or `ptx` that fails is tried with host
updates before any of its inputs is given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from optimizations.appliers.applied import AppliedPlan
from optimizations.appliers.table import TableUnavailable
from optimizations.captured.driver import CudaCallFailed
from optimizations.captured.editing import EditableGraph
from optimizations.captured.graph import Capture, CapturedGraph, KernelNode, MemoryRange, NodePath, Placeholder
from optimizations.captured.placeholders import OutsidePlaceholder, outside_placeholders
from optimizations.captured.read import read_graph
from optimizations.captured.recapture import Recaptured
from optimizations.indirection.exclusions import alignment_bytes, limit, with_reasons
from optimizations.indirection.plan import Applier, Available, Choice, Plan, PtxNode, make_plan
from optimizations.indirection.pointers import Analysis, ReasonCode, find_pointer_uses
from optimizations.indirection.tensor_map import AddressRefused
from optimizations.recording.proof import prove
from optimizations.recording.trial import DeviceTrial, RecordedState, TrialTools, blind_reason
from optimizations.replay.addresses import FollowedInput, Follower, OwnedMemory

Recapture = Callable[[Sequence[Any]], Recaptured]
"""Captures the recorded function once more, with these inputs (`recapture.recapture`)."""


class Tools(TrialTools, Protocol):
    """What a recording needs of its device and function; `tools.RecordingTools` has it."""

    def available(self, graph: CapturedGraph) -> Available:
        """What can be used on the nodes of `graph`."""

    def ptx_refusal(self, node: PtxNode, record: KernelNode) -> str | None:
        """Why this node cannot have a rewritten kernel after all; None where it is ready."""


class RecordedGraph(Protocol):
    """A `torch.cuda.CUDAGraph` captured with `keep_graph=True`."""

    def raw_cuda_graph(self) -> int: ...

    def instantiate(self) -> None: ...

    def raw_cuda_graph_exec(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RecordedInputs:
    """The inputs of the capture that is replayed.

    Attributes:
        again: inputs for one more capture at the same addresses, none of which owns memory of the recording's pool.
        memory: where the data of inputs that were given a placeholder lay, by input.
        owned: memory of the recording's pool, right after the capture.
        state: what a run of the graph changes.
    """

    again: Sequence[Any]
    memory: Mapping[int, MemoryRange]
    owned: tuple[MemoryRange, ...]
    state: RecordedState


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a recording.

    Attributes:
        follower: keeps the graph's addresses in step; None where every input is copied.
        held: placeholders of inputs that are copied, by input. They must be kept as long as the graph.
        plan: None where it did not come to one.
        analysis: what is known of each input, with every reason against it; None as for `plan`.
        off: why nothing was indirected at all, where the reason is not one input's.
        graph: the captured graph, None where it could not be read.
        proof_runs, seconds: what it took.
    """

    follower: Follower | None = None
    held: Mapping[int, OutsidePlaceholder] = field(default_factory=dict)
    plan: Plan | None = None
    analysis: Analysis | None = None
    off: str | None = None
    graph: CapturedGraph | None = None
    proof_runs: int = 0
    seconds: float = 0.0


class IndirectRecording:
    """One recording on its way. Makes the scout capture.

    Args:
        choice: the user's option; anything but `off`.
        caller: the tensors the caller passed for the inputs that may be indirected, by input.
        mutated: which of these the function writes.
        arguments: all inputs, none of which owns memory of the recording's pool.
        capture: captures the function once more.

    Attributes:
        candidates: the inputs that may be indirected.

    Raises:
        torch.OutOfMemoryError: no memory for the placeholders.
    """

    def __init__(
        self,
        choice: Choice,
        caller: Mapping[int, torch.Tensor],
        mutated: Collection[int],
        arguments: Sequence[Any],
        capture: Recapture,
        tools: Tools,
    ) -> None:
        self._started = time.perf_counter()
        self._choice = choice
        self._capture = capture
        self._tools = tools
        self._mutated = frozenset(mutated)
        self._caller = caller
        self._placeholders = outside_placeholders(caller)
        self._shifted_memory = {index: one.shifted_memory for index, one in self._placeholders.items()}
        self._proof_runs = 0
        self.candidates = tuple(self._placeholders)
        self._scout: Recaptured | None = None
        self._off: str | None = None
        self._aliased: frozenset[int] = frozenset()
        shifted = {index: placeholder.shifted for index, placeholder in self._placeholders.items()}
        try:
            self._scout = capture([shifted.get(index, value) for index, value in enumerate(arguments)])
        except (torch.OutOfMemoryError, CudaCallFailed) as error:
            self._off = _one_line(error)
        self._leave_to_stock()

    def _leave_to_stock(self) -> None:
        """Give up the placeholders of inputs that will be copied for sure.

        A mutated input keeps its own even so: what the function writes must be there after the first replay, and in
        the pool the memory may have gone to an intermediate by then.
        """
        if self._scout is None:
            dropped = set(self._placeholders)
        else:
            storages = {index: one.buffer.untyped_storage().data_ptr() for index, one in self._placeholders.items()}
            self._aliased = frozenset(index for index, at in storages.items() if at in self._scout.output_storages)
            dropped = set(self._aliased)
        for index in dropped - self._mutated:
            del self._placeholders[index]

    @property
    def outside(self) -> dict[int, torch.Tensor]:
        """The recording inputs that lie outside of the pool, by input; all others are stock's affair."""
        return {index: placeholder.tensor for index, placeholder in self._placeholders.items()}

    def complete(self, graph: RecordedGraph, recorded: RecordedInputs, input_count: int) -> Outcome:
        """Step 3 above. Then `graph` is instantiated, and the placeholders of copied inputs hold the caller's data.

        Raises:
            CudaCallFailed: the recorded graph could not be changed as its clone could. It cannot be used any more.
        """
        decision = self._decide(graph, recorded)
        follower = self._carry_out(decision, graph, recorded.owned, input_count)
        read_in_place = follower.indices if follower is not None else ()
        held = {index: one for index, one in self._placeholders.items() if index not in read_in_place}
        for index, placeholder in held.items():
            placeholder.fill(self._caller[index])
        return Outcome(
            follower,
            held,
            decision.plan,
            decision.analysis,
            decision.off,
            decision.captured,
            self._proof_runs,
            time.perf_counter() - self._started,
        )

    def _decide(self, graph: RecordedGraph, recorded: RecordedInputs) -> _Decision:
        """Everything up to a proven plan. Note [Doubt]."""
        decision = _Decision(off=self._off)
        if self._scout is None:
            return decision
        try:
            raw = self._tools.driver.CUgraph(graph.raw_cuda_graph())
            decision.captured = read_graph(self._tools.driver, raw)
            decision.editable = EditableGraph.of(self._tools.driver, raw, decision.captured)
            available = self._tools.available(decision.captured)
            decision.triton = frozenset(available.ptx)
            decision.analysis = self._analyse(self._scout, decision.captured, recorded)
            decision.plan, decision.analysis = self._proven(
                decision.editable, decision.analysis, available, recorded.state
            )
        except (CudaCallFailed, AddressRefused, TableUnavailable, ValueError, torch.OutOfMemoryError) as error:
            decision.off = _one_line(error)
        return decision

    def _carry_out(
        self, decision: _Decision, graph: RecordedGraph, owned: Sequence[MemoryRange], input_count: int
    ) -> Follower | None:
        """Change the recorded graph as planned, and instantiate it in any case."""
        plan, analysis, editable = decision.plan, decision.analysis, decision.editable
        if plan is None or analysis is None or editable is None or not any(one.indirect for one in plan.inputs):
            graph.instantiate()
            return None
        applied = AppliedPlan(editable, plan, self._tools)
        graph.instantiate()
        applied.instantiated(self._tools.driver.CUgraphExec(graph.raw_cuda_graph_exec()), self._tools.stream())
        uses = {verdict.input: verdict.uses for verdict in analysis.verdicts}
        followed = [
            FollowedInput(one.input, alignment_bytes(one, uses[one.input], decision.triton), one.input in self._mutated)
            for one in plan.inputs
            if one.indirect
        ]
        return Follower(followed, input_count, applied, OwnedMemory(owned))

    def _analyse(self, scout: Recaptured, captured: CapturedGraph, recorded: RecordedInputs) -> Analysis:
        """Pointer uses, and every reason against an input that is known before anything is tried."""
        replace_address = self._tools.replace_address
        first = Capture(graph=captured, placeholders=_placeholders(recorded.memory), owned=recorded.owned)
        second = Capture(graph=scout.graph, placeholders=_placeholders(self._shifted_memory), owned=scout.owned)
        analysis = find_pointer_uses(first, second, replace_address=replace_address)
        if analysis.doubtful:
            again = self._capture(recorded.again)
            control = Capture(graph=again.graph, placeholders=first.placeholders, owned=again.owned)
            analysis = find_pointer_uses(first, second, control=control, replace_address=replace_address)
            # Where an input was given up its place in the second capture is gone, and there is nothing to repeat.
            if analysis.doubtful and self._placeholders.keys() == self._shifted_memory.keys():
                shifted = {index: placeholder.shifted for index, placeholder in self._placeholders.items()}
                again = self._capture([shifted.get(index, value) for index, value in enumerate(recorded.again)])
                repeat = Capture(graph=again.graph, placeholders=second.placeholders, owned=again.owned)
                analysis = find_pointer_uses(
                    first, second, control=control, repeat=repeat, replace_address=replace_address
                )
        analysis = limit(analysis, captured, self._aliased)
        open_inputs = [verdict.input for verdict in analysis.verdicts if verdict.indirect]
        reasons = {index: blind_reason(self._caller[index]) for index in open_inputs}
        blind = {index: reason for index, reason in reasons.items() if reason is not None}
        return with_reasons(analysis, ReasonCode.UNPROVEN, blind)

    def _proven(
        self, graph: EditableGraph, analysis: Analysis, available: Available, state: RecordedState
    ) -> tuple[Plan, Analysis]:
        """A plan all of whose indirect inputs passed the proof together, and the reasons against the others."""
        while True:
            plan, available = self._assembled(graph.captured, analysis, available)
            indirect = [one.input for one in plan.inputs if one.indirect]
            if not indirect:
                return plan, analysis
            trial = DeviceTrial(graph, plan, self._tools, self._placeholders, self._caller, self._mutated, state)
            with trial:
                verdict = prove(indirect, trial)
            self._proof_runs += verdict.runs
            if len(verdict.proven) == len(indirect):
                return plan, analysis
            failed = next(iter(verdict.refused.values()))
            if plan.prelude_nodes or plan.ptx_nodes:
                reason = f"the proof failed: {failed}"
                off = {Applier.PRELUDE: reason, Applier.PTX: reason}
                available = replace(available, off={**available.off, **off})
            else:
                analysis = with_reasons(analysis, ReasonCode.UNPROVEN, verdict.refused)

    def _assembled(self, captured: CapturedGraph, analysis: Analysis, available: Available) -> tuple[Plan, Available]:
        """A plan whose rewritten kernels are all built, and what was available for it."""
        kernels = {path: node for path, node in captured.walk() if isinstance(node, KernelNode)}
        while True:
            plan = make_plan(captured, analysis, self._choice, available)
            refusals = {node.node: self._tools.ptx_refusal(node, kernels[node.node]) for node in plan.ptx_nodes}
            refused = {path: reason for path, reason in refusals.items() if reason is not None}
            if not refused:
                return plan, available
            ptx = {
                path: [refused[path]] * len(answers) if path in refused else answers
                for path, answers in available.ptx.items()
            }
            available = replace(available, ptx=ptx)


@dataclass(slots=True)
class _Decision:
    """As far as it came."""

    captured: CapturedGraph | None = None
    editable: EditableGraph | None = None
    triton: Collection[NodePath] = ()
    analysis: Analysis | None = None
    plan: Plan | None = None
    off: str | None = None


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _placeholders(memory: Mapping[int, MemoryRange]) -> tuple[Placeholder, ...]:
    return tuple(Placeholder(input=index, memory=memory[index]) for index in sorted(memory))
