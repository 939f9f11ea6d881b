"""Let the graph of a step read inputs where they lie, though they lie elsewhere in each call.

Note [By name]. Where only Triton kernels that Inductor wrote were given an input (`launches`), its addresses are
parameters of these launches (`graph.named_uses`), and the host sets them. The placeholder of an input has memory of its
own for as long as the recording lives. So no node parameter but these may point into it; of operators that launch
kernels counts what they were given (Note [What an operator was given] in `launches`). Nor may a gradient lie in it that
the call left, or a result that is copied after the launch. Nothing has to be tried out.

One is copied into its placeholder after all, in a call where it is not aligned as the kernels may rely on, or lies in
memory that the graph writes (`in_place.addresses`).
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
"""An input that more kernels read is copied: each takes a call of the driver when it moved, and a copy takes one."""


def worth_reading(launches: Launches, memory: Mapping[int, MemoryRange]) -> list[int]:
    """Return inputs, given by their placeholders' memory, that launches name and that nothing else reads.

    Nothing else was given a part of one.
    """
    if launches.unknown is not None:
        return []
    named = {storage for launch in launches.launches for _, storage in launch.tensors}
    read = sorted(launches.read_by_operators | launches.read_elsewhere)

    def is_read(place: MemoryRange) -> bool:
        return bisect_left(read, place.address) < bisect_left(read, place.address + place.size_bytes)

    return [index for index, place in memory.items() if place.address in named and not is_read(place)]


def plan_of(graph: CapturedGraph, launches: Launches, memory: Mapping[int, MemoryRange]) -> Plan:
    """Plan what the host sets when these inputs move. Note [By name].

    Args:
        graph: the captured graph.
        launches: what put its nodes there.
        memory: by input, its placeholder, for inputs that nothing but launches was given (`worth_reading`).
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


def words_that_tell(graph: CapturedGraph, launches: Launches) -> list[int]:
    """Return what may be addresses in the nodes of a graph, but for kernels of operators.

    Of these counts what they were given, if nothing is unknown. Note [What an operator was given] in `launches`.
    """
    launched = {launch.node for launch in launches.launches}

    def tells(path: NodePath, node: Node) -> bool:
        of_an_operator = path[0] not in launched and isinstance(node, KernelNode)
        return len(path) > 1 or not of_an_operator

    return [word for path, node in graph.walk() if tells(path, node) for word in words_of(node)]


def _without_others(
    analysis: Analysis, graph: CapturedGraph, memory: Mapping[int, MemoryRange], launches: Launches
) -> Analysis:
    """Leave out inputs whose placeholder the graph has other addresses of, but for those of kernels of operators."""
    words = words_that_tell(graph, launches)
    others = {}
    for verdict in analysis.verdicts:
        place = memory[verdict.input]
        inside = sum(place.address <= word < place.address + place.size_bytes for word in words)
        if inside != len(verdict.uses):
            others[verdict.input] = f"the graph holds {inside} addresses in it, {len(verdict.uses)} of them by name"
    return with_reasons(analysis, ReasonCode.UNEXPLAINED, others)
