"""Whether two captures are of the same work: same nodes, same functions, same launch fields, same edges.

Only then can a word of one be compared with the word in the same place of the other. Addresses and parameter bytes are
what may differ. A library that picks another kernel for another address (by its alignment, say) shows here.
"""

from __future__ import annotations

from typing import Any

from optimizations.graph.records import (
    CapturedGraph,
    ChildGraphNode,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    Node,
    NodePath,
)


def difference(first: CapturedGraph, second: CapturedGraph, path: NodePath = ()) -> str | None:
    """What differs between the graphs apart from addresses and parameter bytes, in words; None where nothing does."""
    where = f" in the child graph at node {format_path(path)}" if path else ""
    if len(first.nodes) != len(second.nodes):
        return f"{len(first.nodes)} nodes in one capture and {len(second.nodes)} in the other{where}"
    for index, (one, other) in enumerate(zip(first.nodes, second.nodes, strict=True)):
        found = _node_difference(one, other, (*path, index))
        if found:
            return found
    if set(first.edges) != set(second.edges):
        return f"the dependencies between the nodes differ{where}"
    return None


def format_path(path: NodePath) -> str:
    """A node's path as it stands in messages: `3`, or `3/0` for node 0 of the child graph at node 3."""
    return "/".join(str(index) for index in path)


def _node_difference(first: Node, second: Node, path: NodePath) -> str | None:
    if first.kind != second.kind:
        return f"node {format_path(path)} is a {first.kind} node in one capture and a {second.kind} node in the other"
    if isinstance(first, ChildGraphNode) and isinstance(second, ChildGraphNode):
        return difference(first.graph, second.graph, path)
    shapes = _shape(first), _shape(second)
    for field, value in shapes[0].items():
        if value != shapes[1][field]:
            return f"node {format_path(path)} ({first.kind}) differs in {field}: {value} and {shapes[1][field]}"
    return None


def _shape(node: Node) -> dict[str, Any]:
    """The fields of a node that must agree, without addresses and parameter bytes."""
    match node:
        case KernelNode():
            shape = node.model_dump(exclude={"parameters"})
            shape["parameter layout"] = [(parameter.offset, parameter.size) for parameter in node.parameters]
            return shape
        case MemcpyNode():
            return node.model_dump(exclude={"source": {"address"}, "destination": {"address"}})
        case MemsetNode():
            return node.model_dump(exclude={"address"})
        case _:
            return node.model_dump()
