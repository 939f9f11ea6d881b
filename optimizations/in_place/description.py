"""Turn the state of a recording into its report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from optimizations.graph.memory import size_bytes
from optimizations.graph.plan import Choice, Plan, PlannedNode
from optimizations.graph.pointers import PointerUse, UseKind
from optimizations.graph.records import WORD_BYTES
from optimizations.graph.tensor_map import TENSOR_MAP_BYTES
from optimizations.in_place.addresses import AddressTracker
from optimizations.in_place.examination import Findings, ineligible_reason
from optimizations.in_place.session import Session
from optimizations.report.concurrency import ConcurrencyReport
from optimizations.report.recordings import RecordingReport, ReplayedInput

RESTING = "copying the inputs was measured to be faster"


def describe(session: Session, node: Any, chain: str) -> RecordingReport:
    """Return the report of a recording (`trees.node.EncoreNode`); `chain` is why its launches stay a chain."""
    recorded, findings = session.recorded, session.findings
    tracker: AddressTracker | None = node.tracker
    names = [placeholder.name for placeholder in node.wrapped_function.placeholders]
    against, uses = _findings(findings)
    plan = findings.plan if findings is not None else None
    planned = {one.node: one for one in plan.nodes} if plan is not None else {}
    in_place = set(tracker.indices) if tracker is not None else set()
    if tracker is not None:
        against = {**against, **dict.fromkeys(tracker.resting, (RESTING,))}

    def input_report(index: int) -> ReplayedInput:
        value, indirect = recorded.inputs[index], index in in_place
        updaters = {planned[use.node].updater.value for use in uses[index] if use.node in planned}
        return ReplayedInput(
            index=index,
            name=names[index] if index < len(names) else f"input {index}",
            data_bytes=size_bytes(value),
            indirect=indirect,
            mutated=index in node.wrapped_function.mutated_input_idxs,
            nodes=len({use.node for use in uses[index]}),
            pointers=len(uses[index]),
            updaters=tuple(sorted(updaters)) if indirect else (),
            reasons=() if indirect else _reasons(value, against.get(index, ()), session),
            has_placeholder=index not in recorded.without_placeholder,
        )

    replayed = tuple(map(input_report, recorded.copied))
    nodes = findings.captured.nodes if findings is not None else None
    pointers = [use for one in replayed if one.indirect for use in uses[one.index]]
    return RecordingReport(
        direction=node.function.direction,
        nodes=None if nodes is None else len(nodes),
        kernels=session.kernels,
        inputs=replayed,
        copied_bytes=node.copied_per_replay,
        pointer_bytes=_pointer_bytes(plan, planned, pointers) if in_place else 0,
        fallbacks=_fallbacks(plan),
        off=session.off,
        stage=session.stage.value,
        waiting=session.waiting,
        replays=node.replays,
        steady_replays=node.replays - node.full_replays,
        moves=tracker.moves if tracker is not None else 0,
        total_copied_bytes=node.copied_bytes + (tracker.placeholder_bytes if tracker is not None else 0),
        total_pointer_bytes=tracker.pointer_bytes if tracker is not None else 0,
        concurrency=session.branches.report() if session.branches is not None else ConcurrencyReport("chain", chain),
    )


def _reasons(value: Any, against: Sequence[str], session: Session) -> tuple[str, ...]:
    ineligible = ineligible_reason(value)
    if ineligible is not None:
        return (ineligible,)
    found = tuple(dict.fromkeys(against))
    if not found and session.waiting is not None:
        found = (f"waiting for {session.waiting}",)
    return found or ((session.off,) if session.off is not None else ())


def _findings(
    findings: Findings | None,
) -> tuple[dict[int, tuple[str, ...]], Mapping[int, Sequence[PointerUse]]]:
    """Return the reasons against each input, and the places where its address was found."""
    if findings is None:
        return {}, defaultdict(tuple)
    uses = {verdict.input: verdict.uses for verdict in findings.analysis.verdicts}
    against = {one.input: tuple(reason.message for reason in one.reasons) for one in findings.plan.inputs}
    return against, defaultdict(tuple, uses)


def _pointer_bytes(plan: Plan | None, planned: Mapping[int, PlannedNode], uses: Sequence[PointerUse]) -> int:
    """Return the bytes written when all inputs moved: the pointer table, and each address set from the host."""
    from_host = (
        TENSOR_MAP_BYTES if use.kind is UseKind.TENSOR_MAP else WORD_BYTES
        for use in uses
        if use.node in planned and planned[use.node].updater is Choice.HOST
    )
    return sum(from_host) + (sum(slot.size_bytes for slot in plan.slots) if plan is not None else 0)


def _fallbacks(plan: Plan | None) -> tuple[str, ...]:
    if plan is None:
        return ()
    return tuple(f"node {node}: {reason}" for node, reason in plan.fallbacks)
