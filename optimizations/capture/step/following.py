"""Let the graph of a step read inputs in place although their addresses change on every call.

Note [By name]. If only Triton kernels that Inductor generated receive an input (`launches`), its addresses are
parameters of these launches (`graph.named_uses`), and the host updates them. The placeholder of an input has its own
memory for the life of the recording. So no other node parameter may point into it. For operators that launch kernels,
their arguments count instead (Note [What an operator was given] in `launches`). Gradients that the call left, and
results that are copied after the launch, must not overlap it either. No trial launch is needed.

An input is still copied into its placeholder in a call where it lacks the alignment that the kernels may rely on, or
overlaps memory that the graph writes (`in_place.addresses`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from optimizations.capture.step.launches import Launches
from optimizations.graph.named_uses import find_named_uses
from optimizations.graph.plan import Available, Choice, Plan, make_plan, with_reasons
from optimizations.graph.pointers import Analysis, ReasonCode
from optimizations.graph.records import (
    Capture,
    CapturedGraph,
    KernelNode,
    MemoryRange,
    Node,
    NodePath,
    Placeholder,
    words_of,
)

MOST_NODES = 4
"""An input that more kernels read is copied: a copy is one driver call, and a move takes one for each kernel."""


def worth_reading(launches: Launches, memory: Mapping[int, MemoryRange]) -> list[int]:
    """Return inputs, given by their placeholders' memory, that only named launches read.

    No operator and no unknown code received any part of these.
    """
    if launches.unknown is not None:
        return []
    named = {storage for launch in launches.launches for _, storage in launch.tensors}
    read = sorted(launches.read_by_operators | launches.read_elsewhere)

    def is_read(place: MemoryRange) -> bool:
        return bisect_left(read, place.address) < bisect_left(read, place.address + place.size_bytes)

    return [index for index, place in memory.items() if place.address in named and not is_read(place)]


def plan_of(graph: CapturedGraph, launches: Launches, memory: Mapping[int, MemoryRange]) -> Plan:
    """Plan the node updates for a change of these inputs' addresses. Note [By name].

    Args:
        graph: the captured graph.
        launches: what added its nodes.
        memory: the placeholder of each input that only launches read (`worth_reading`).
    """
    by_address = {place.address: index for index, place in memory.items()}
    passed = [
        (launch.kernel, [by_address[address] for address, _ in launch.tensors if address in by_address])
        for launch in launches.launches
    ]
    kernels = {path for path, node in graph.walk() if isinstance(node, KernelNode)}
    triton = frozenset((launch.node,) for launch in launches.launches if (launch.node,) in kernels)
    placeholders = tuple(Placeholder(input=index, memory=place) for index, place in sorted(memory.items()))
    analysis = find_named_uses(
        Capture(graph=graph, placeholders=placeholders), passed, set(memory), triton, "an operator reads it"
    )
    analysis = _without_others(analysis, graph, memory, launches)
    many = {
        verdict.input: f"{len({use.node for use in verdict.uses})} kernels read it"
        for verdict in analysis.verdicts
        if len({use.node for use in verdict.uses}) > MOST_NODES
    }
    analysis = with_reasons(analysis, ReasonCode.NO_UPDATER, many)
    return make_plan(graph, analysis, Choice.HOST, Available(triton))


def conclusive_words(graph: CapturedGraph, launches: Launches) -> list[int]:
    """Return the node parameters that may be addresses, except those of operators' kernels.

    For operators their arguments count, if no launch is unknown. Note [What an operator was given] in `launches`.
    """
    launched = {launch.node for launch in launches.launches}

    def tells(path: NodePath, node: Node) -> bool:
        of_an_operator = path[0] not in launched and isinstance(node, KernelNode)
        return len(path) > 1 or not of_an_operator

    return [word for path, node in graph.walk() if tells(path, node) for word in words_of(node)]


def _without_others(
    analysis: Analysis, graph: CapturedGraph, memory: Mapping[int, MemoryRange], launches: Launches
) -> Analysis:
    """Exclude inputs into whose placeholder other node parameters point, except those of operators' kernels."""
    words = conclusive_words(graph, launches)
    others = {}
    for verdict in analysis.verdicts:
        place = memory[verdict.input]
        inside = sum(place.address <= word < place.address + place.size_bytes for word in words)
        if inside != len(verdict.uses):
            others[verdict.input] = f"the graph holds {inside} addresses in it, {len(verdict.uses)} of them by name"
    return with_reasons(analysis, ReasonCode.UNEXPLAINED, others)
