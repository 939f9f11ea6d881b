"""Turns the outcome of a recording into its report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optimizations.captured.difference import format_path
from optimizations.captured.graph import WORD_BYTES, KernelNode, NodePath
from optimizations.indirection.plan import Applier, Plan
from optimizations.indirection.pointers import Analysis, PointerUse, UseKind
from optimizations.indirection.tensor_map import TENSOR_MAP_BYTES
from optimizations.recording.session import Outcome
from optimizations.report.recordings import Direction, RecordingReport, ReplayedInput


@dataclass(frozen=True, slots=True)
class CopiedOrNot:
    """An input a recording has to provide for. `ineligible`: why it was never a candidate for indirection."""

    index: int
    name: str
    data_bytes: int
    mutated: bool
    ineligible: str | None


def describe(outcome: Outcome, inputs: Sequence[CopiedOrNot], direction: Direction) -> RecordingReport:
    """The report of a recording with these inputs."""
    against, uses = _findings(outcome.analysis)
    appliers = _appliers(outcome.plan)
    in_place = outcome.follower.indices if outcome.follower is not None else ()
    if outcome.plan is not None:
        against |= {one.input: tuple(reason.message for reason in one.reasons) for one in outcome.plan.inputs}
    replayed = tuple(
        ReplayedInput(
            index=one.index,
            name=one.name,
            data_bytes=one.data_bytes,
            indirect=one.index in in_place,
            mutated=one.mutated,
            nodes=len({use.node for use in uses[one.index]}),
            pointers=len(uses[one.index]),
            appliers=_names(appliers, uses[one.index]) if one.index in in_place else (),
            reasons=() if one.index in in_place else _reasons(one, against.get(one.index, ()), outcome.off),
        )
        for one in inputs
    )
    nodes = list(outcome.graph.walk()) if outcome.graph is not None else None
    pointers = [use for one in replayed if one.indirect for use in uses[one.index]]
    return RecordingReport(
        direction=direction,
        nodes=None if nodes is None else len(nodes),
        kernels=None if nodes is None else sum(isinstance(node, KernelNode) for _, node in nodes),
        inputs=replayed,
        copied_bytes=sum(one.data_bytes for one in replayed if not one.indirect),
        pointer_bytes=_pointer_bytes(outcome.plan, appliers, pointers),
        fallbacks=_fallbacks(outcome.plan),
        off=outcome.off,
        proof_runs=outcome.proof_runs,
        indirection_s=outcome.seconds,
    )


def _findings(
    analysis: Analysis | None,
) -> tuple[dict[int, tuple[str, ...]], Mapping[int, Sequence[PointerUse]]]:
    """By input: the reasons against it, and where its address was found."""
    verdicts = analysis.verdicts if analysis is not None else ()
    against = {verdict.input: tuple(reason.message for reason in verdict.reasons) for verdict in verdicts}
    return against, defaultdict(tuple, {verdict.input: verdict.uses for verdict in verdicts})


def _appliers(plan: Plan | None) -> dict[NodePath, Applier]:
    if plan is None:
        return {}
    return (
        {node.node: Applier.HOST for node in plan.host_nodes}
        | {node.node: Applier.PRELUDE for node in plan.prelude_nodes}
        | {node.node: Applier.PTX for node in plan.ptx_nodes}
    )


def _names(appliers: Mapping[NodePath, Applier], uses: Sequence[PointerUse]) -> tuple[str, ...]:
    return tuple(sorted({appliers[use.node].value for use in uses}))


def _reasons(one: CopiedOrNot, against: Sequence[str], off: str | None) -> tuple[str, ...]:
    if one.ineligible is not None:
        return (one.ineligible,)
    return tuple(dict.fromkeys(against)) or ((off,) if off is not None else ())


def _pointer_bytes(plan: Plan | None, appliers: Mapping[NodePath, Applier], uses: Sequence[PointerUse]) -> int:
    """Bytes written when everything moved: the pointer table, and each place set from the host."""
    from_host = (
        TENSOR_MAP_BYTES if use.kind is UseKind.TENSOR_MAP else WORD_BYTES
        for use in uses
        if appliers[use.node] is Applier.HOST
    )
    return sum(from_host) + (plan.table_bytes if plan is not None else 0)


def _fallbacks(plan: Plan | None) -> tuple[str, ...]:
    if plan is None:
        return ()
    return tuple(f"node {format_path(node)}: {reason}" for node, reason in plan.fallbacks)
