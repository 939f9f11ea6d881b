"""Inputs that must be copied although their pointers are known: reasons that lie outside of the search for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from optimizations.graph.collectives import is_collective_kernel
from optimizations.graph.difference import format_path
from optimizations.graph.pointers import Analysis, Reason, ReasonCode, UseKind
from optimizations.graph.records import CapturedGraph, KernelNode, MemcpyNode


def limit(analysis: Analysis, graph: CapturedGraph, aliased: Collection[int], *, tried_out: bool = True) -> Analysis:
    """`analysis` with the reasons that follow from the graph as a whole and from its outputs.

    Args:
        graph: the captured graph that will be replayed.
        aliased: inputs that an output shares memory with.
        tried_out: whether the graph would be run to prove what was found.
    """
    analysis = with_reasons(
        analysis,
        ReasonCode.OUTPUT_ALIAS,
        dict.fromkeys(aliased, "an output shares its memory, and must stay valid when the caller's is gone"),
    )
    collective = _collective(graph) if tried_out else None
    if collective is not None:
        reason = f"the graph takes part in a collective ({collective}), so it cannot be tried out on one device alone"
        everyone = dict.fromkeys((verdict.input for verdict in analysis.verdicts), reason)
        analysis = with_reasons(analysis, ReasonCode.COLLECTIVE, everyone)
    return with_reasons(analysis, ReasonCode.NO_APPLIER, dict(_multidimensional_copies(analysis, graph)))


def with_reasons(analysis: Analysis, code: ReasonCode, messages: Mapping[int, str]) -> Analysis:
    """`analysis` with one more reason against each of these inputs."""
    verdicts = tuple(
        dataclasses.replace(verdict, reasons=(*verdict.reasons, Reason(code, messages[verdict.input])))
        if verdict.input in messages
        else verdict
        for verdict in analysis.verdicts
    )
    return dataclasses.replace(analysis, verdicts=verdicts)


def _collective(graph: CapturedGraph) -> str | None:
    names = (node.name for _, node in graph.walk() if isinstance(node, KernelNode) and node.name)
    return next((name for name in names if is_collective_kernel(name)), None)


def _multidimensional_copies(analysis: Analysis, graph: CapturedGraph) -> Iterable[tuple[int, str]]:
    """Inputs used by copies that `cuGraphExecMemcpyNodeSetParams` does not take."""
    copies = {path: node for path, node in graph.walk() if isinstance(node, MemcpyNode)}
    for use in analysis.uses:
        if use.kind in (UseKind.MEMCPY_SOURCE, UseKind.MEMCPY_DESTINATION):
            copy = copies[use.node]
            if copy.height * copy.depth != 1:
                yield use.input, f"node {format_path(use.node)} copies in several dimensions and cannot be updated"
