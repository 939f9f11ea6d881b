"""Change one recording, step by step, from stock's graph into one that reads its inputs in place.

A recording is made as stock makes it and copies its inputs. Everything else happens here, during calls of the program:

1. *waiting*: nothing is done until the graph has been replayed a few times (`budget`), and memory is free;
   *racing*: the graph's chain is timed against branches (`concurrency.branches`), before anything changes nodes;
2. *examination* (`examination`): if the generated code names every use of the inputs, the recorded graph is read;
   otherwise the function is captured once more, and the two graphs are compared. The result is a plan (`graph.plan`).
   It reads an input in place only if all uses are arguments of Triton kernels or of products (`generated`);
3. *done*: the plan is applied to the recorded graph, or the graph stays as stock made it, with the reason.

Note [Doubt]. A failure on the way (no memory, a driver call that fails) only means that inputs are copied. The recorded
graph does not change before the plan is complete, and the call in which it changes replays the graph as recorded.
`Session.run` propagates exceptions of the replay only.

Note [What is changed once]. A plan with a pointer table adds or replaces nodes of the recorded graph, and the graph is
instantiated again. If this fails or is interrupted, it is not retried: the nodes added before would write into a freed
table. The new executable must not be launched before a tracker maintains its addresses, because its table is empty. If
instantiation fails, there is no executable. A recording in such a state is not replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch

from optimizations.concurrency.branches import Branches
from optimizations.graph.applied import AppliedPlan
from optimizations.graph.memory import size_bytes
from optimizations.graph.plan import Choice, Plan, with_reasons
from optimizations.graph.pointers import ReasonCode
from optimizations.graph.pools import pool_memory
from optimizations.graph.records import KernelNode
from optimizations.in_place.addresses import AddressTracker, is_readable
from optimizations.in_place.budget import Use, is_about_memory
from optimizations.in_place.examination import (
    Examination,
    Findings,
    Host,
    Recorded,
    ineligible_reason,
)
from optimizations.selection import CopiedInput, reason_to_copy
from optimizations.stack_trace import one_line

REPLAYS_AFTER_A_RACE = 8
"""Replays during which the graph may be changed after a race, however long the race took."""

NOT_YET = "it has not been replayed often enough yet"
SELDOM = "other graphs of the function are replayed for most calls"

OTHER_USES = "kernels other than Triton's and products read it, which may reach it through memory"

MOST_CALLS_SEEN = 30
"""Calls in which a recording notes the addresses of its inputs."""

FEWEST_CALLS_SEEN = 4
"""Calls after which an input counts as one that can never be read in place."""

NOT_READABLE = "it was not aligned, or in memory that the graph writes, in each of the first calls"
"""Why an input is copied that a program slices, or passes back from its graphs."""


class Stage(StrEnum):
    WAITING = "waiting"
    RACING = "racing"
    DONE = "done"


class Session:
    """Change one recording into one that reads its inputs in place, in the stages that the module describes.

    Args:
        recorded: the recording.
        host: its node. With its option `selection="rule"` inputs stay copied that are cheaper to copy than to read in
            place.
        branches: the race of the graph's chain against branches; None if there is none.

    Attributes:
        waiting: what the session waits for, as text; None if it does not wait.
        unusable: why the recording must not be replayed; None if it may. Note [What is changed once].
    """

    def __init__(self, recorded: Recorded, host: Host, branches: Branches | None) -> None:
        self.recorded = recorded
        self.host = host
        self.examination = Examination(recorded, host)
        self._choice = Choice(host.options.indirection)
        self.use = Use()
        self._counted = False
        self._eligible = [one for one in recorded.copied if ineligible_reason(recorded.inputs[one]) is None]
        self.branches = branches
        self._declined = False
        self.stage = Stage.WAITING if self._may_gain() or self._undecided is not None else Stage.DONE
        self._read_by_name = False
        self.waiting: str | None = NOT_YET if self.stage is Stage.WAITING else None
        self.off: str | None = None
        self.findings: Findings | None = None
        self.unusable: str | None = None
        self.in_place: frozenset[int] = frozenset()
        self._tracker: AddressTracker | None = None
        self._applied: AppliedPlan | None = None
        self._seen: list[dict[int, int]] = []

    # Calls of the program

    def run(self, inputs: list[Any], replay: Callable[[list[Any]], Any]) -> Any:
        """Run a call of the program on `inputs` by `replay`, and do the work that is due. Note [Doubt]."""
        if not self._counted:
            self._count(inputs)
        self._counted = False
        if not self._is_due or torch.cuda.is_current_stream_capturing():  # the program's: nothing may be added to it
            return replay(inputs)
        if self.stage is Stage.RACING:
            return self._racing_call(inputs, replay)
        if self.stage is Stage.WAITING:
            if (undecided := self._undecided) is not None:
                self._order_launches(undecided)
            else:
                self._guarded(self._examine)
        return replay(inputs)

    def rests(self, inputs: Sequence[Any]) -> bool:
        """Count this call, and return whether `run` would only replay in it."""
        if self.unusable is not None:
            return False
        if self.stage is Stage.DONE:
            return True
        self._count(inputs)
        self._counted = self._is_due
        return not self._counted

    @property
    def _is_due(self) -> bool:
        """Return whether work is due in this call."""
        if self.stage is Stage.DONE:
            return False
        return self.use.due if self._undecided is None else self.use.may_race

    def _count(self, inputs: Sequence[Any]) -> None:
        """Count a replay, and note the addresses of its copied inputs."""
        self.use.replays += 1
        if self.host.is_seldom() and self.stage is Stage.WAITING:
            self._give_up(SELDOM)
        if self.stage is Stage.WAITING and len(self._seen) <= MOST_CALLS_SEEN:
            self._seen.append({index: inputs[index].data_ptr() for index in self._eligible})

    @property
    def pending(self) -> bool:
        """Return whether work is left that more calls will do."""
        return self.stage is not Stage.DONE and not is_about_memory(self.waiting)

    @property
    def kernels(self) -> int | None:
        """Return the number of kernels of the recorded graph; None if it was not read."""
        if self.findings is None:
            return None
        return sum(isinstance(node, KernelNode) for node in self.findings.captured.nodes)

    def still_read(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory that launches on this stream read until they complete.

        Call it before the session is released.
        """
        if self._applied is not None:
            self._applied.still_read(stream)

    def decline(self, reason: str) -> None:
        """Leave the recording as stock made it."""
        if self._undecided is not None and self.stage is not Stage.DONE:
            self.off, self._declined = reason, True
        elif self.stage is not Stage.DONE:
            self._give_up(reason)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step, and give up if it fails. Note [Doubt]."""
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
        if (undecided := self._undecided) is not None:
            undecided.stop(self.off or "nothing is done with the recording any more")

    def _may_gain(self) -> bool:
        return not self._declined and bool(self._eligible)

    # Branches

    @property
    def _undecided(self) -> Branches | None:
        """Return the race of the chain against branches while it is undecided."""
        return self.branches if self.branches is not None and self.branches.pending else None

    def _order_launches(self, branches: Branches) -> None:
        """Begin the race of the chain against branches, if launches can overlap."""
        try:
            pool = [one.span for one in pool_memory(self.recorded.pool)]
            branches.prepare(self.examination.editable.captured, pool)
        except Exception as error:
            branches.stop(one_line(error))
        if branches.is_racing:
            self.stage, self.waiting = Stage.RACING, "concurrency: a chain and branches are timed on the next calls"
        else:
            self._after_the_race()

    def _racing_call(self, inputs: list[Any], replay: Callable[[list[Any]], Any]) -> Any:
        branches = self.branches
        assert branches is not None

        def replay_raced() -> Any:
            self._point_again(branches)
            return replay(inputs)

        try:
            return branches.run(replay_raced)
        finally:
            self._point_again(branches)
            if not branches.pending:
                self._after_the_race()

    def _point_again(self, branches: Branches) -> None:
        """Write all addresses again before the next replay: the race may have instantiated the graph again."""
        self.unusable = branches.unusable
        if self._tracker is None or self.unusable is not None:
            return
        self.unusable = "its addresses were not written again"
        try:
            tools = self.examination.tools
            executable = tools.driver.CUgraphExec(self.recorded.graph.raw_cuda_graph_exec())
            assert self._applied is not None
            self._applied.instantiated(executable, tools.stream())
            self._tracker.forget()
            self.unusable = None
        except Exception as error:
            self.unusable = one_line(error)

    def _after_the_race(self) -> None:
        if self._may_gain():
            self.stage, self.waiting = Stage.WAITING, NOT_YET
            self.use.extend(REPLAYS_AFTER_A_RACE)
        else:
            self._end()

    # Without placeholders

    def settle_by_name(self) -> None:
        """Apply the plan right after the recording; a failure is stored in `unusable`. See `without_placeholder`."""
        self.unusable, self._declined = "its inputs have no placeholders, and their addresses cannot be set", True
        try:
            examination = self.examination
            findings = examination.by_name(examination.candidates(self.recorded.copied), "it is copied", Choice.HOST)
            others = set(findings.in_place) - self.recorded.without_placeholder
            if cheap := self._cheap_to_copy(others, findings.plan):
                analysis = with_reasons(findings.analysis, ReasonCode.CHEAPER, cheap)
                findings = examination.planned(findings, analysis, Choice.HOST)
            if missing := self.recorded.without_placeholder.difference(findings.in_place):
                against = next(one for one in findings.analysis.verdicts if one.input in missing)
                raise ValueError(f"input {against.input}: {', '.join(one.message for one in against.reasons)}")
            self._carry_out(findings)
            if self._undecided is None:
                self._end()
        except Exception as error:
            self._give_up(one_line(error))

    # Stage 2

    def _examine(self) -> None:
        examination = self.examination
        cheap = self._cheap_to_copy(self._eligible)
        if cheap.keys() == set(self._eligible):
            self._give_up(next(iter(cheap.values())))
            return
        refusal = examination.not_captured_again()
        if not self._read_by_name:
            self._read_by_name = True
            if self._take_by_name(refusal):
                return
        candidates = examination.candidates(self.recorded.copied)
        if refusal is None and len(examination.unproven(candidates)) == len(candidates):
            refusal = OTHER_USES
        if refusal is not None:
            self._give_up(refusal)
            return
        self.waiting = examination.short_of_memory(candidates)
        if self.waiting is not None and self.use.is_over:
            self._give_up(self.waiting)
        elif self.waiting is None:
            self._take(examination.compare(candidates, self._choice))

    def _take_by_name(self, refusal: str | None) -> bool:
        """Apply a plan for inputs whose uses the generated code names; return whether the recording is done.

        It is done if a second capture could add no input, or if a `refusal` excludes it and some inputs are named.
        """
        examination = self.examination
        candidates = examination.candidates(self.recorded.copied)
        named = [index for index in candidates if examination.code.triton_uses.get(index)]
        compared = set(candidates).difference(named, examination.unproven(candidates))
        if not named or (refusal is None and compared):
            return False
        findings = examination.by_name(candidates, refusal or OTHER_USES, self._choice)
        if not findings.in_place or (refusal is None and not set(named) <= set(findings.in_place)):
            return False
        self._take(findings)
        return True

    def _take(self, findings: Findings) -> None:
        """Apply the findings, for inputs whose uses are all known from the generated code."""
        examination, moving = self.examination, set(findings.in_place)
        refused = dict.fromkeys(examination.unproven(moving), OTHER_USES)
        cheap = self._cheap_to_copy(moving.difference(refused), findings.plan)
        elsewhere = self._never_readable(findings, moving.difference(refused, cheap))
        for code, messages in (
            (ReasonCode.UNPROVEN, refused),
            (ReasonCode.CHEAPER, cheap),
            (ReasonCode.NOT_READABLE, elsewhere),
        ):
            if messages:
                findings = examination.planned(findings, with_reasons(findings.analysis, code, messages), self._choice)
        self.findings = findings
        if findings.in_place:
            self.stage = Stage.DONE  # an interrupt from here on does not repeat it
            self._carry_out(findings)
        self._end()

    def _never_readable(self, findings: Findings, indices: Collection[int]) -> dict[int, str]:
        """Return why inputs stay copied that were unreadable in all calls so far, by input."""
        if len(self._seen) < FEWEST_CALLS_SEEN:
            return {}
        examination = self.examination
        overwritten = examination.overwritten()
        return {
            one.index: NOT_READABLE
            for one in examination.tracked(findings)
            if one.index in indices
            and not any(is_readable(one, seen[one.index], overwritten) for seen in self._seen if one.index in seen)
        }

    def _cheap_to_copy(self, indices: Iterable[int], plan: Plan | None = None) -> dict[int, str]:
        """Return why inputs stay copied that could be read in place, by input; `plan` gives the cost of updates."""
        if self.host.options.selection != "rule":
            return {}
        nodes = [] if plan is None else plan.nodes
        found = {}
        for index in indices:
            using = [node for node in nodes if any(use.input == index for use in node.uses)]
            candidate = CopiedInput(
                data_bytes=size_bytes(self.recorded.inputs[index]),
                updates=sum(node.updater is Choice.HOST for node in using) if plan is not None else 1,
                through_table=any(node.updater is Choice.PRELUDE for node in using),
                moves=sum(before[index] != now[index] for before, now in pairwise(self._seen)),
                calls=max(0, len(self._seen) - 1),
                copied_inputs=max(1, len(self.recorded.copied)),
            )
            if (reason := reason_to_copy(candidate)) is not None:
                found[index] = reason
        return found

    # Stage 3

    def _carry_out(self, findings: Findings) -> None:
        """Apply the plan to the recorded graph. Note [What is changed once].

        Raises:
            CudaCallFailed: the graph could not be changed.
        """
        tools = self.examination.tools
        self.findings = findings
        applied = self._applied = AppliedPlan(self.examination.editable, findings.plan, tools)
        graph, tracked = self.recorded.graph, self.examination.tracked(findings)
        addresses: list[int | None] = [None] * len(self.recorded.inputs)
        for one in tracked:
            addresses[one.index] = self.recorded.inputs[one.index].data_ptr()
        if findings.plan.slots:
            self.unusable = "its changed graph was not put to use"
            graph.instantiate()
        applied.instantiated(tools.driver.CUgraphExec(graph.raw_cuda_graph_exec()), tools.stream())
        if findings.plan.slots:  # the pointer table is empty
            for one in tracked:
                addresses[one.index] = 0
        tracker = AddressTracker(tracked, addresses, applied, self.examination.overwritten(), self.host.fill)
        self.in_place = frozenset(one.index for one in tracked)
        self._tracker = tracker
        self.host.use_tracker(tracker, findings.unused)
        self.unusable = None
