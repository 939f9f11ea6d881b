"""Find the addresses of inputs in one captured graph if the generated code names every use of them.

A Triton kernel reaches an input through its parameters only. So if the generated code passes an input to Triton kernels
only, its addresses are parameters of those launches and nothing else. No second capture is needed to distinguish them
from other values. The other nodes of the graph, including collectives, are irrelevant.

Note [Which launch is which]. The memory of a dead input may be reused by an intermediate, so the same address can have
another meaning in later launches. Launches are identified by their order: the graph's Triton kernels must be those of
the source, in the same order and with the same names. The driver lists nodes in the order of capture; if an edge leads
backwards, this does not hold, and no address is found. Two launches that share memory depend on one another, so their
order is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from optimizations.graph.pointers import Analysis, InputVerdict, PointerUse, Reason, ReasonCode
from optimizations.graph.records import (
    WORD_BYTES,
    Capture,
    CapturedGraph,
    KernelNode,
    MemoryRange,
    words_in,
)


def find_named_uses(
    capture: Capture,
    launches: Sequence[tuple[str, Sequence[int]]],
    named: Collection[int],
    triton: Collection[int],
    others: str,
) -> Analysis:
    """Return the places in the graph of `capture` that hold addresses of its inputs.

    Args:
        capture: the recorded graph and its placeholders.
        launches: the Triton kernels that the generated code launches, in its order: the driver's name of each, and the
            inputs among its arguments, repeated if passed repeatedly.
        named: the inputs that only these launches use.
        triton: the nodes that launch Triton kernels.
        others: why inputs that are not in `named` are copied.
    """
    every = enumerate(capture.graph.nodes)
    nodes = [(index, node) for index, node in every if isinstance(node, KernelNode) and index in triton]
    unlike = _unlike(capture.graph, [node.name for _, node in nodes], [name for name, _ in launches])
    verdicts = []
    for placeholder in sorted(capture.placeholders, key=lambda one: one.input):
        index = placeholder.input
        if index not in named:
            verdicts.append(_copied(index, ReasonCode.UNPROVEN, others))
        elif unlike is not None:
            verdicts.append(_copied(index, ReasonCode.UNEXPLAINED, unlike))
        else:
            passed = [list(inputs).count(index) for _, inputs in launches]
            verdicts.append(_verdict(index, placeholder.memory, nodes, passed))
    return Analysis(tuple(verdicts), ())


def _verdict(
    index: int, memory: MemoryRange, nodes: Sequence[tuple[int, KernelNode]], passed: Sequence[int]
) -> InputVerdict:
    """Return the findings on one input; `passed` is how often it was passed to each node."""
    uses = []
    for (place, node), times in zip(nodes, passed, strict=True):
        if not times:
            continue  # this input was not passed to it; Note [Which launch is which]
        found = list(_addresses(node, memory))
        plain = [one for one in found if one[2] == memory.address and node.parameters[one[0]].size == WORD_BYTES]
        if not len(found) == len(plain) == times:
            return _copied(
                index,
                ReasonCode.UNEXPLAINED,
                f"{node.name} was given it {times} times, and its node holds {len(found)} addresses in it, "
                f"{len(plain)} of them plain parameters",
            )
        uses += [PointerUse(place, parameter, offset, index, 0) for parameter, offset, _ in plain]
    if not uses:
        return _copied(index, ReasonCode.NO_USE, "no kernel uses it")
    return InputVerdict(index, tuple(sorted(uses)), ())


def _copied(index: int, code: ReasonCode, message: str) -> InputVerdict:
    return InputVerdict(index, (), (Reason(code, message),))


def _unlike(graph: CapturedGraph, found: Sequence[str | None], named: Sequence[str]) -> str | None:
    """Return why the graph's Triton kernels may not be those of the source, one by one; None where they are."""
    if list(found) != list(named):
        return (
            f"the graph's {len(found)} Triton kernels are not the {len(named)} that the generated code launches, "
            "one by one"
        )
    if any(edge.source >= edge.target for edge in graph.edges):
        return "the driver does not list the graph's nodes in the order in which they depend on one another"
    return None


def _addresses(node: KernelNode, memory: MemoryRange) -> Iterator[tuple[int, int, int]]:
    """Yield parameter, byte offset and value of everything in a node that points into `memory`."""
    for index, parameter in enumerate(node.parameters):
        for offset, value in words_in(parameter):
            if value in memory:
                yield index, offset, value
