"""Extract parts of a graph as graphs that are evaluated on the CPU, by the operators that the program named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import torch
import torch.fx

from optimizations import torch_internals
from optimizations.placement.fx_editing import retarget

CPU = torch.device("cpu")


def evaluation(
    graph_module: torch.fx.GraphModule, wanted: Set[str], inputs: Sequence[str], results: Iterable[str]
) -> torch.fx.GraphModule:
    """Return the nodes `wanted` of a graph, in their order, as a function of `inputs` that returns `results`.

    All these are node names. Constants are made on the CPU even under another default device: the program's constants
    for other devices say so themselves.
    """
    graph = torch.fx.Graph()
    copies = {name: graph.placeholder(name) for name in inputs}
    for node in graph_module.graph.nodes:
        if node.name not in wanted or node.name in copies:
            continue
        copies[node.name] = graph.node_copy(node, lambda operand: copies[operand.name])
        copies[node.name].meta = {}
        if node.op == "call_function" and node.target in torch_internals.device_constructors():
            retarget(copies[node.name], CPU)
    graph.output(tuple(copies[name] for name in results))
    return torch.fx.GraphModule(graph_module, graph)


def inputs_of(graph_module: torch.fx.GraphModule, wanted: Set[str]) -> tuple[str, ...]:
    """Return the names of the other nodes that the nodes `wanted` read, in order of the graph."""
    read = {
        operand.name
        for node in graph_module.graph.nodes
        if node.name in wanted
        for operand in node.all_input_nodes
        if operand.name not in wanted
    }
    return tuple(node.name for node in graph_module.graph.nodes if node.name in read)
