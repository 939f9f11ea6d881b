"""Decide which CPU operations of a graph can be evaluated before it, which after it, and which have to stay in it.

Operations run on the CPU, by the operators that the program named and in its order, wherever they are evaluated; what
changes is only whether that is before the GPU's part of the graph, within it, or after it. Two operations keep
their order if one reads what the other computed, or if both touch the same CPU memory (or the CPU's random numbers) and
one of them writes. So an operation goes before the graph if all that has to precede it does, and after the graph if
all that has to follow it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from optimizations.placement.residency import MIXED, Residency, ResidentNode

RANDOM_NUMBERS = -1
"""The CPU's generator, as memory that every draw writes."""


def reached(names: Iterable[str], needed_by: Callable[[str], Iterable[str]]) -> set[str]:
    """Return these names, and all that they need, directly or not."""
    found = set(names)
    pending = list(found)
    while pending:
        new = set(needed_by(pending.pop())) - found
        found |= new
        pending += new
    return found


@dataclass(frozen=True, slots=True)
class Regions:
    """Hold the regions of a graph as names of nodes.

    Attributes:
        before: operations that can be evaluated before the graph.
        after: operations that can be evaluated after it. They depend on GPU values.
        reasons: why each other CPU operation can be neither.
        precede: the nodes that have to come before each node: its operands, and others that use its CPU memory.
    """

    before: frozenset[str]
    after: frozenset[str]
    reasons: Mapping[str, str]
    precede: Mapping[str, frozenset[str]]


def regions(graph: Residency) -> Regions:
    """Return the regions of all CPU operations of `graph`, and of the nodes they take sizes and numbers from."""
    precede = _order(graph)
    follow: dict[str, set[str]] = {name: set() for name in graph.nodes}
    for name, earlier in precede.items():
        for other in earlier:
            follow[other].add(name)
    reasons: dict[str, str] = {}
    late: set[str] = set()
    before: set[str] = set()
    for name, node in graph.nodes.items():
        if not _is_candidate(node):
            continue
        if any(_is_on_gpu(graph.nodes[other], node) or other in late for other in precede[name]):
            late.add(name)
            reason = _against_both(graph, node)
        else:
            reason = (
                _against_both(graph, node)
                or ("requires a gradient, which has to arrive on the CPU" if node.requires_grad else None)
                or _not_first(precede[name], graph, before, reasons)
            )
            if reason is None:
                before.add(name)
        if reason is not None:
            reasons[name] = reason
    after = _after(graph, late, before, reasons, follow)
    return Regions(frozenset(before), frozenset(after), reasons, precede)


def _order(graph: Residency) -> dict[str, frozenset[str]]:
    """Return the nodes that must precede each node. The graph itself keeps the order of uses of GPU memory."""
    on_cpu = {storage for node in graph.nodes.values() if node.device in ("cpu", MIXED) for storage in node.storages}
    readers: dict[int, list[str]] = {}
    writers: dict[int, list[str]] = {}
    precede: dict[str, frozenset[str]] = {}
    for name, node in graph.nodes.items():
        writes = set(node.writes & on_cpu)
        if node.random_on_cpu:
            writes.add(RANDOM_NUMBERS)
        reads: set[int] = set()
        if node.is_call and not node.reads_nothing:
            reads = {storage for operand in node.operands for storage in graph.nodes[operand].storages} & on_cpu
        earlier = set(node.operands)
        for storage in reads | writes:
            earlier.update(writers.get(storage, ()))
        for storage in writes:
            earlier.update(readers.get(storage, ()))
            writers.setdefault(storage, []).append(name)
        for storage in reads:
            readers.setdefault(storage, []).append(name)
        precede[name] = frozenset(earlier - {name})
    return precede


def _is_candidate(node: ResidentNode) -> bool:
    """Return whether it is a CPU operation, a read of CPU values, or arithmetic on sizes and numbers."""
    if not node.is_call or node.switches:
        return False
    return node.device in ("cpu", MIXED) or (node.device is None and (node.reads_nothing or bool(node.host_reads)))


def _is_on_gpu(earlier: ResidentNode, node: ResidentNode) -> bool:
    """Return whether `node` has to wait for a value on the GPU. The size of an input is known before the graph."""
    return (earlier.on_gpu or earlier.device == MIXED) and (earlier.is_call or not node.reads_nothing)


def _against_both(graph: Residency, node: ResidentNode) -> str | None:
    if node.opaque is not None:
        return node.opaque
    if node.device == MIXED:
        return "its values are on several devices"
    if node.host_reads:
        return "reads values on the host"
    if not graph.input_storages.isdisjoint(node.writes):
        return "changes CPU memory that is visible outside of the graph"
    return None


def _not_first(precede: frozenset[str], graph: Residency, before: set[str], reasons: Mapping[str, str]) -> str | None:
    for other in precede:
        if graph.nodes[other].is_call and other not in before and not graph.nodes[other].switches:
            return f"goes together with {other}: {reasons.get(other, 'it stays in the graph')}"
    return None


def _after(
    graph: Residency,
    late: set[str],
    before: set[str],
    reasons: Mapping[str, str],
    follow: Mapping[str, set[str]],
) -> set[str]:
    after: set[str] = set()
    for name in reversed(list(graph.nodes)):
        needed = bool(follow[name]) or not graph.nodes[name].reads_nothing
        if name in late and name not in reasons and needed and after.issuperset(follow[name]):
            after.add(name)
    while True:
        unable = {name for name in after if not _reachable(graph, name, before, after)}
        unable |= {name for name in after - unable if not unable.isdisjoint(follow[name])}
        if not unable:
            return after
        after -= unable


def _reachable(graph: Residency, name: str, before: set[str], after: set[str]) -> bool:
    """Return whether all operands are available after the graph, which returns single tensors only."""
    operands = (graph.nodes[operand] for operand in graph.nodes[name].operands)
    return all(
        not operand.is_call or operand.name in before or operand.name in after or operand.tensors == 1
        for operand in operands
    )
