"""What is done with one recording after it was made: from stock's graph to one that reads its inputs in place.

A recording is made as stock makes it and copies its inputs. Everything else happens here, in calls of the program:

1. *waiting*: nothing, until the graph has been used enough to win the work back (`budget`), and the memory is free;
2. *capture*: the function is captured once more, with its inputs elsewhere; nothing of that is ever run. The two graphs
   are compared (`indirection.pointers`) and a plan is made (`indirection.plan`);
3. *proof*: inputs whose every use is named by the generated code (`generated`) need none. For others a candidate runs
   next to the copying graph in calls of the program (`trial`), until outcomes decide (`proof`);
4. *done*: the plan is carried out on the recorded graph, or everything stays as stock has it, with the reason.

Note [Doubt]. Whatever goes wrong on the way (no memory, a driver call that fails, an outcome that differs) costs
indirection and nothing else: the recorded graph is not touched before stage 4, and the call it happens in is served by
the recorded graph. `Session.run` lets no exception of its own reach the program, only those of the replay.

Inputs at fixed addresses (parameters) are not looked at here; see `fixed_inputs`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

import torch

from optimizations import torch_internals
from optimizations.appliers.applied import AppliedPlan
from optimizations.captured.displaced import buffer_bytes, displace, memory_of, size_bytes
from optimizations.captured.driver import CudaCallFailed, check
from optimizations.captured.editing import EditableGraph
from optimizations.captured.graph import Capture, CapturedGraph, KernelNode, MemoryRange, NodePath, Placeholder
from optimizations.captured.pools import pool_memory
from optimizations.captured.read import read_graph
from optimizations.captured.recapture import Recaptured
from optimizations.indirection.exclusions import limit, with_reasons
from optimizations.indirection.plan import Available, Choice, Plan, PlannedNode, make_plan
from optimizations.indirection.pointers import Analysis, InputVerdict, ReasonCode, UseKind, find_pointer_uses
from optimizations.recording.budget import Use, waiting_for_memory
from optimizations.recording.generated import GeneratedCode
from optimizations.recording.proof import MOST_CALLS, Proof, Standing
from optimizations.recording.trial import Candidate, Effects, TrialCall, TrialTools
from optimizations.replay.addresses import AddressTracker, OwnedMemory, TrackedInput

CAPTURE_COST = 4.0
"""What one more capture and its analysis take, in times of the recording. Estimated; the time spent is measured."""

TRIAL_COST = 4.0
"""What a trial call takes more than a plain one, in calls. Estimated."""

MOST_UNDER_WAY = 8
"""Trial calls whose outcome is not known yet. A program that never waits for the device is hundreds of launches ahead
of it, and one outcome at a time would take that many calls for each of `proof.MOST_CALLS`."""


class Stage(StrEnum):
    WAITING = "waiting"
    PROVING = "proving"
    DONE = "done"


class Tools(TrialTools, Protocol):
    """What a recording needs of its device and function; `appliers.device.RecordingTools` has it."""

    def available(self, graph: CapturedGraph) -> Available:
        """What can be used on the nodes of `graph`."""

    def ptx_refusal(self, node: PlannedNode, record: KernelNode) -> str | None:
        """Why this node cannot have a rewritten kernel after all; None where it is ready."""

    def free_bytes(self) -> int:
        """Device memory that nobody has taken."""


class KeptGraph(Protocol):
    """A `torch.cuda.CUDAGraph` captured with `keep_graph=True`."""

    def raw_cuda_graph(self) -> int: ...

    def instantiate(self) -> None: ...

    def raw_cuda_graph_exec(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recording as stock made it. No tensor here owns its memory.

    Attributes:
        graph: what is replayed.
        inputs: where the graph reads each input: placeholders, inputs at fixed addresses, results of earlier graphs.
        copied: inputs that stock copies before each replay.
        fixed: inputs at fixed addresses; results of earlier graphs are not among them.
        returned: copied inputs whose placeholder an output shares memory with.
        pool: handle of the graph's memory pool.
        seconds: how long the recording took.
    """

    graph: KeptGraph
    inputs: Sequence[Any]
    copied: Sequence[int]
    fixed: Sequence[int]
    returned: frozenset[int]
    pool: Any
    seconds: float


class Host(Protocol):
    """What a session asks of the node that it belongs to."""

    def effects(self, inputs: Sequence[Any]) -> Effects:
        """What a run on these inputs changes."""

    def fill(self, values: Mapping[int, torch.Tensor]) -> None:
        """Copy values into placeholders, as stock does before a replay."""

    def at_address(self, index: int, address: int) -> torch.Tensor:
        """The recording input `index` as a tensor at another address, which it does not own."""

    def values(self) -> Sequence[torch.Tensor]:
        """The tensors among the outputs, as the graph leaves them."""

    def use_tracker(self, tracker: AddressTracker, unused: frozenset[int]) -> None:
        """From now on the tracker's inputs are read in place, and `unused` ones not looked at."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What the comparison of two captures, and a plan made from it, say of a recording.

    `triton` are the nodes that launch Triton kernels; `unused` are inputs that the generated code does not use at all.
    """

    captured: CapturedGraph
    analysis: Analysis
    plan: Plan
    triton: frozenset[NodePath]
    available: Available
    unused: frozenset[int]


class Session:
    """See the module.

    Args:
        recorded: the recording.
        host: its node.
        choice: the user's option; anything but `off`.
        code: gives what is known of the generated function; asked for once, at stage 2.
        capture: captures the function once more with these inputs.
        tools: gives what is needed of the device.
        alone: whether one thread calls the function, so that no other draws random numbers while it is captured.
        inside: whether the call lies inside a capture of the program's own, where nothing may be added.
    """

    def __init__(
        self,
        recorded: Recorded,
        host: Host,
        choice: Choice,
        code: Callable[[], GeneratedCode],
        capture: Callable[[Sequence[Any]], Recaptured],
        tools: Callable[[], Tools],
        alone: Callable[[], bool] = lambda: True,
        inside: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.recorded = recorded
        self.host = host
        self._choice = choice
        self._code_of = code
        self._capture = capture
        self._tools_of = tools
        self._alone = alone
        self.inside = inside
        self._clock = clock
        self._tools: Tools | None = None
        self._code: GeneratedCode | None = None
        self.use = Use()
        self._counted = False
        self.stage = Stage.WAITING if self._may_gain() else Stage.DONE
        self.waiting: str | None = self.use.plan(CAPTURE_COST * recorded.seconds)
        self.off: str | None = None
        self.findings: Findings | None = None
        self.trial_calls = 0
        self.committed = False
        self.in_place: frozenset[int] = frozenset()
        self._editable: EditableGraph | None = None
        self._candidate: Candidate | None = None
        self._proof: Proof | None = None
        self._trials: deque[TrialCall] = deque()
        self._earlier: dict[int, torch.Tensor] = {}
        self._fixed: tuple[int, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the recording runs."""
        assert self._tools is not None
        return self._tools.device

    # The program's calls

    def run(self, inputs: list[Any], replay: Callable[[list[Any]], Any]) -> Any:
        """A call of the program on `inputs`, served by `replay`. Note [Doubt]."""
        started = self._clock()
        if not self._counted:
            self.use.called(started)
        self._counted = False
        if not self.use.due or self.inside():
            return replay(inputs)
        if self.stage is Stage.WAITING:
            self._guarded(self._try_capture)
            self.use.spent_s += self._clock() - started
            if self.stage is Stage.WAITING:
                self.use.plan(CAPTURE_COST * self.recorded.seconds)
            elif self.stage is Stage.PROVING:
                self._plan_trial()
            return replay(inputs)
        if self.stage is Stage.PROVING:
            return self._proving_call(inputs, replay)
        return replay(inputs)

    def rests(self) -> bool:
        """Whether `run` would do nothing but replay in this call. The call is counted here."""
        if self.stage is Stage.DONE:
            return True
        self.use.called(self._clock())
        self._counted = self.use.due
        return not self._counted

    @property
    def pending(self) -> bool:
        """Whether something is still to be done that only takes more calls."""
        waits_for_memory = self.waiting is not None and self.waiting.startswith("memory")
        return self.stage is not Stage.DONE and not waits_for_memory

    @property
    def active(self) -> bool:
        """Whether `run` has anything to do in the next call."""
        return self.stage is not Stage.DONE

    def close(self) -> None:
        """Give back what is held on the device."""
        candidate, self._candidate = self._candidate, None
        self._trials.clear()
        self._earlier = {}
        if candidate is not None:
            candidate.close()

    def stop(self) -> None:
        """End what is under way; inputs that are not proven yet stay copied."""
        if self.stage is not Stage.DONE:
            self._give_up("it was not proven before an input at a fixed address moved")

    def decline(self, reason: str) -> None:
        """Leave the recording as stock made it."""
        if self.stage is not Stage.DONE:
            self._give_up(reason)

    def resume_with(self, fixed: Iterable[int]) -> None:
        """Look at the copied inputs again, now that these inputs at fixed addresses are followed."""
        if not self.in_place and self._may_gain():
            self._fixed = tuple(fixed)
            self.off = None
            self.stage = Stage.WAITING
            self.waiting = self.use.plan(0.0)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Note [Doubt]."""
        try:
            step()
        except Exception as error:
            self._give_up(one_line(error))

    def _give_up(self, reason: str) -> None:
        self.off = reason
        self._end()

    def _end(self) -> None:
        self.stage = Stage.DONE
        self.waiting = None
        try:
            self.close()
        except CudaCallFailed as error:
            self.off = self.off or one_line(error)

    def _may_gain(self) -> bool:
        return any(self._ineligible(index) is None for index in self.recorded.copied)

    def _ineligible(self, index: int) -> str | None:
        return ineligible_reason(self.recorded.inputs[index])

    # Stage 2

    def _try_capture(self) -> None:
        candidates = self.candidates([*self.recorded.copied, *self._fixed])
        self.prepare()
        self.waiting = self.short_of_memory(candidates)
        if self.waiting is not None:
            return
        findings = self.compare(candidates, Choice.HOST if self._fixed else self._choice)
        self.findings = findings
        indirect = [one.input for one in findings.plan.inputs if one.indirect]
        if set(indirect) <= set(self._fixed):
            self._end()
            return
        unproven = self.unproven(findings, [index for index in indirect if index not in self._fixed])
        refused = {
            index: "kernels of unknown construction read it, and it may hold indices: trying it out could use values "
            "that the program never passed together"
            for index in unproven
            if not _holds_real_numbers(self.recorded.inputs[index])
        }
        if refused:
            analysis = with_reasons(findings.analysis, ReasonCode.UNPROVEN, refused)
            findings = self.findings = self._planned(findings, analysis)
            indirect = [one.input for one in findings.plan.inputs if one.indirect]
            unproven = [index for index in unproven if index in indirect]
        if not unproven and not findings.plan.slots:
            self.commit(findings)
            return
        self._candidate = self.candidate(findings)
        self._proof = Proof(frozenset(unproven))
        self.stage = Stage.PROVING

    def prepare(self) -> None:
        """Tools and source. Anything that may not be captured once more ends here.

        Raises:
            NotCapturedAgain: it may not.
        """
        if self._code is None:
            self._code = self._code_of()
        if self._code.opaque is not None:
            raise NotCapturedAgain(f"the function is not captured once more: {self._code.opaque}")
        if self._tools is None:
            self._tools = self._tools_of()
        draws = self._code.random or any(isinstance(one, torch.Generator) for one in self.recorded.inputs)
        if draws and not self._alone():
            raise NotCapturedAgain(
                "the function is not captured once more: it may draw random numbers, and several threads call it"
            )

    def candidates(self, indices: Iterable[int]) -> dict[int, MemoryRange]:
        """Where the graph reads those of these inputs whose address may be replaced."""
        return {index: memory_of(self.recorded.inputs[index]) for index in indices if self._ineligible(index) is None}

    def short_of_memory(self, candidates: Mapping[int, MemoryRange]) -> str | None:
        assert self._tools is not None
        pool = sum(one.size_bytes for one in pool_memory(self.recorded.pool))
        return waiting_for_memory(pool + buffer_bytes(candidates), self._tools.free_bytes())

    def compare(self, candidates: Mapping[int, MemoryRange], choice: Choice) -> Findings:
        """One more capture with the candidates elsewhere, and what the two graphs say.

        Raises:
            torch.OutOfMemoryError, CudaCallFailed: no memory, or a graph that cannot be read.
        """
        assert self._tools is not None and self._code is not None
        driver = self._tools.driver
        raw = driver.CUgraph(self.recorded.graph.raw_cuda_graph())
        captured = read_graph(driver, raw)
        self._editable = EditableGraph.of(driver, raw, captured)
        available = self._tools.available(captured)
        analysis = self._analysis(captured, candidates)
        aliased = [index for index in candidates if index in self.recorded.returned]
        analysis = limit(analysis, captured, aliased)
        reused = {
            index: "the function takes its memory for something else once it is dead"
            for index in candidates
            if index in (self._code.reused or ())
        }
        analysis = with_reasons(analysis, ReasonCode.OUTPUT_ALIAS, reused)
        plan, available = self._assembled(captured, analysis, choice, available)
        named = self._code.triton_uses
        unused = frozenset(
            verdict.input for verdict in analysis.verdicts if not verdict.uses and named.get(verdict.input) == 0
        )
        return Findings(captured, analysis, plan, frozenset(available.ptx), available, unused)

    def _analysis(self, captured: CapturedGraph, candidates: Mapping[int, MemoryRange]) -> Analysis:
        assert self._tools is not None
        device = self._tools.device
        buffer = torch.empty(buffer_bytes(candidates) + 512, dtype=torch.uint8, device=device)
        start = -(-buffer.data_ptr() // 512) * 512
        places = displace(candidates, start)
        elsewhere = {index: start + offset for index, offset in places.offsets.items()}
        recorded = self.recorded.inputs

        def displaced() -> Sequence[Any]:
            return [
                self.host.at_address(index, elsewhere[index]) if index in elsewhere else value
                for index, value in enumerate(recorded)
            ]

        def capture_of(made: Recaptured, memory: Mapping[int, MemoryRange]) -> Capture:
            return Capture(graph=made.graph, placeholders=_placeholders(memory), owned=made.owned)

        moved = {
            index: MemoryRange(address=elsewhere[index], size_bytes=one.size_bytes) for index, one in candidates.items()
        }
        owned = pool_memory(self.recorded.pool)
        first = Capture(graph=captured, placeholders=_placeholders(candidates), owned=owned)
        second = capture_of(self._capture(displaced()), moved)
        replace_address = self._tools.replace_address
        analysis = find_pointer_uses(first, second, replace_address=replace_address)
        if analysis.doubtful:
            again = [
                self.host.at_address(index, value.data_ptr()) if isinstance(value, torch.Tensor) else value
                for index, value in enumerate(recorded)
            ]
            control = capture_of(self._capture(again), candidates)
            analysis = find_pointer_uses(first, second, control=control, replace_address=replace_address)
            if analysis.doubtful:
                repeat = capture_of(self._capture(displaced()), moved)
                analysis = find_pointer_uses(
                    first, second, control=control, repeat=repeat, replace_address=replace_address
                )
        return analysis

    def _assembled(
        self, captured: CapturedGraph, analysis: Analysis, choice: Choice, available: Available
    ) -> tuple[Plan, Available]:
        """A plan whose rewritten kernels are all built, and what was available for it."""
        assert self._tools is not None
        kernels = {path: node for path, node in captured.walk() if isinstance(node, KernelNode)}
        while True:
            plan = make_plan(captured, analysis, choice, available)
            refusals = {node.node: self._tools.ptx_refusal(node, kernels[node.node]) for node in plan.of(Choice.PTX)}
            refused = {path: reason for path, reason in refusals.items() if reason is not None}
            if not refused:
                return plan, available
            ptx = {
                path: [refused[path]] * len(answers) if path in refused else answers
                for path, answers in available.ptx.items()
            }
            available = replace(available, ptx=ptx)

    def _planned(self, findings: Findings, analysis: Analysis) -> Findings:
        """The findings with another analysis, and the plan that follows from it."""
        choice = Choice.HOST if self._fixed else self._choice
        plan, available = self._assembled(findings.captured, analysis, choice, findings.available)
        return replace(findings, analysis=analysis, plan=plan, available=available)

    def unproven(self, findings: Findings, indices: Iterable[int]) -> list[int]:
        """Inputs whose uses the generated code does not name one and all."""
        assert self._code is not None
        verdicts = {verdict.input: verdict for verdict in findings.analysis.verdicts}
        known = self._code.triton_uses
        return [index for index in indices if not _is_as_named(verdicts[index], known.get(index), findings.triton)]

    # Stage 3

    def _proving_call(self, inputs: list[Any], replay: Callable[[list[Any]], Any]) -> Any:
        begun = self._clock()
        trial: TrialCall | None = None
        try:
            self._judge()
            if self.stage is Stage.PROVING and self._may_try():
                trial = self._next_trial(inputs)
        except Exception as error:
            self._give_up(one_line(error))
        if trial is None or self._candidate is None:
            return replay(inputs)
        tensors = {index: inputs[index] for index in self.recorded.copied if isinstance(inputs[index], torch.Tensor)}
        addresses = {index: inputs[index].data_ptr() for index in self._candidate.inputs}
        candidate = self._candidate
        results: list[Any] = []
        try:
            trial.run(tensors, lambda: results.append(replay(inputs)), lambda: candidate.launch(addresses))
            self._trials.append(trial)
            self.trial_calls += 1
            self._keep(tensors)
        except Exception as error:
            if not results:
                raise  # of the program's own call
            self._give_up(one_line(error))
        self.use.spent_s += self._clock() - begun
        if self.stage is Stage.PROVING:
            self._plan_trial()
        return results[0]

    def _plan_trial(self) -> None:
        planned = self.use.plan(TRIAL_COST * self.use.mean_call_s)
        self.waiting = f"{planned}; {self.trial_calls} trial calls so far, {len(self._trials)} of them under way"

    def _may_try(self) -> bool:
        """Whether one more trial call is of use, as far as outcomes are known."""
        assert self._proof is not None
        return len(self._trials) < min(MOST_UNDER_WAY, MOST_CALLS - self._proof.calls)

    def _judge(self) -> None:
        """Take the outcomes of earlier trial calls into account, as far as they are there."""
        assert self._proof is not None
        while self._trials and self.stage is Stage.PROVING:
            observed = self._trials[0].result()
            if observed is None:
                return
            self._trials.popleft()
            # Begun before it was known that the function may not repeat itself, it says nothing.
            if not (self._proof.needs_spread and observed.spread is None and any(observed.deviations)):
                self._conclude(self._proof.add(observed))

    def _conclude(self, verdict: Standing) -> None:
        """What follows from where the proof stands."""
        assert self._proof is not None
        if verdict is Standing.UNDECIDED:
            return
        assert self.findings is not None
        if verdict is Standing.PROVEN:
            failed = self._candidate.failure() if self._candidate else None
            if failed is None:
                self.commit(self.findings)
                return
            self._proof.objection = failed
        if verdict is Standing.PARTLY:
            failed = self._candidate.failure() if self._candidate else None
            choice = Choice.HOST if failed or self._fixed else self._choice
            self._refuse("it held the same data in each trial call", self._proof.always_the_same, choice)
            return
        self._refuse(self._proof.objection or "the proof failed", self._proof.unproven)

    def _refuse(self, objection: str, unproven: Collection[int], choice: Choice = Choice.HOST) -> None:
        """Read everything else in place, by default from the host; copy these."""
        assert self.findings is not None
        off = unproven or {one.input for one in self.findings.plan.inputs if one.indirect}
        analysis = with_reasons(self.findings.analysis, ReasonCode.UNPROVEN, dict.fromkeys(off, objection))
        plan = make_plan(self.findings.captured, analysis, choice, self.findings.available)
        self.findings = replace(self.findings, analysis=analysis, plan=plan)
        if any(one.indirect for one in plan.inputs):
            self.commit(self.findings)
        else:
            self._end()

    def _next_trial(self, inputs: Sequence[Any]) -> TrialCall | None:
        """A trial with this call, if it may be done and these inputs can be read in place."""
        assert self._proof is not None and self._candidate is not None and self._tools is not None
        effects = self.host.effects(inputs)
        unproven = sorted(self._proof.unproven)
        needed = effects.copied_bytes(spread=self._proof.needs_spread) + sum(
            2 * size_bytes(inputs[index]) for index in unproven
        )
        short = waiting_for_memory(needed, self._tools.free_bytes())
        if short is not None:
            self.waiting = short
            return None
        self._plan_trial()
        if not self._readable_in_place(inputs):
            return None
        if any(index not in self._earlier for index in unproven):
            self._keep({index: inputs[index] for index in unproven})
            return None
        again = self._launch_recorded if self._proof.needs_spread else None
        return TrialCall(effects, unproven, dict(self._earlier), self.host.fill, again, self._tools.device)

    def _keep(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Keep this call's data of unproven inputs for the next trial."""
        assert self._proof is not None
        self._earlier = {
            index: torch_internals.clone_preserve_strides(tensors[index]) for index in sorted(self._proof.unproven)
        }

    def _launch_recorded(self) -> None:
        assert self._tools is not None
        driver = self._tools.driver
        executable = driver.CUgraphExec(self.recorded.graph.raw_cuda_graph_exec())
        check(driver.cuGraphLaunch, executable, self._tools.stream())

    def _readable_in_place(self, inputs: Sequence[Any]) -> bool:
        assert self.findings is not None and self._candidate is not None
        owned = self.owned()
        for one in self.tracked(self.findings):
            address = inputs[one.index].data_ptr()
            if address % one.alignment_bytes or address in owned:
                return False
        return True

    def candidate(self, findings: Findings) -> Candidate:
        """A copy of the recorded graph that is changed as planned.

        Raises:
            CudaCallFailed, AddressRefused, TableUnavailable: the plan cannot be carried out.
        """
        assert self._editable is not None and self._tools is not None
        return Candidate(self._editable, findings.plan, self._tools)

    def restricted(self, findings: Findings, keep: Collection[int], choice: Choice) -> Findings:
        """The findings with a plan that reads no other inputs than these in place."""
        others = {
            verdict.input: "it is copied as before"
            for verdict in findings.analysis.verdicts
            if verdict.input not in keep
        }
        analysis = with_reasons(findings.analysis, ReasonCode.UNPROVEN, others)
        return replace(
            findings, analysis=analysis, plan=make_plan(findings.captured, analysis, choice, findings.available)
        )

    def owned(self) -> OwnedMemory:
        """Memory that the graph writes."""
        return OwnedMemory(pool_memory(self.recorded.pool))

    # Stage 4

    def tracked(self, findings: Findings) -> list[TrackedInput]:
        copied = set(self.recorded.copied)
        return [
            TrackedInput(
                one.input,
                one.alignment_bytes,
                self.recorded.inputs[one.input].data_ptr() if one.input in copied else None,
            )
            for one in findings.plan.inputs
            if one.indirect
        ]

    def commit(self, findings: Findings) -> None:
        """Carry the plan out on the recorded graph.

        Raises:
            CudaCallFailed: it could not be changed as its copy could.
        """
        assert self._editable is not None and self._tools is not None
        self.findings = findings
        applied = AppliedPlan(self._editable, findings.plan, self._tools)
        graph = self.recorded.graph
        if findings.plan.slots:  # nodes were added, or exchanged
            graph.instantiate()
        applied.instantiated(self._tools.driver.CUgraphExec(graph.raw_cuda_graph_exec()), self._tools.stream())
        tracked = self.tracked(findings)
        addresses: list[int | None] = [None] * len(self.recorded.inputs)
        for one in tracked:
            addresses[one.index] = self.recorded.inputs[one.index].data_ptr()
        if findings.plan.slots or self.committed:  # the pointer table is empty, or the graph was patched before
            for one in tracked:
                addresses[one.index] = 0
        owned = self.owned()

        def fill(index: int, value: torch.Tensor) -> None:
            self.host.fill({index: value})

        self.host.use_tracker(AddressTracker(tracked, addresses, applied, owned, fill), findings.unused)
        self.committed = True
        self.in_place = frozenset(one.index for one in tracked) & frozenset(self.recorded.copied)
        self._end()


class NotCapturedAgain(RuntimeError):
    """A function must not be captured once more; the message says why."""


def ineligible_reason(value: Any) -> str | None:
    """Why the address of a recording input is not looked for; None where it is."""
    if not isinstance(value, torch.Tensor):
        return "it is not a tensor"
    if not value.is_cuda:
        return f"it lies on {value.device}"
    if value.is_conj() or value.is_neg():
        return "it is a lazy conjugate or negative, which a copy resolves"
    if size_bytes(value) == 0:
        return "it holds no bytes, so there is nothing to gain"
    return None


def _holds_real_numbers(value: torch.Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def _is_as_named(verdict: InputVerdict, named: int | None, triton: frozenset[NodePath]) -> bool:
    """Whether the uses found are exactly the arguments of Triton kernels that the generated code names."""
    plain = all(use.kind is UseKind.PARAMETER and use.node in triton and use.delta == 0 for use in verdict.uses)
    return named is not None and plain and len(verdict.uses) == named


def one_line(error: BaseException) -> str:
    if isinstance(error, NotCapturedAgain):
        return str(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _placeholders(memory: Mapping[int, MemoryRange]) -> tuple[Placeholder, ...]:
    return tuple(Placeholder(input=index, memory=where) for index, where in sorted(memory.items()))
