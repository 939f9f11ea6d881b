"""Copy FX graphs, change the device of their calls, and read their outputs and attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals


def copy_of(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy of a graph module with nodes of the same names and everything that Dynamo noted on the original.

    Dynamo's records of real inputs are not taken along: they would keep these alive.
    """
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, copies))
    result = torch.fx.GraphModule(graph_module, graph)
    for original, copy in copies.items():
        copy.meta.pop("grapharg", None)
        torch_internals.copy_notes(original, copy)
    for name, child in graph_module.named_children():
        # Graphs for saved tensors' hooks are children that no node refers to.
        if not hasattr(result, name):
            result.add_module(name, child)
    result.meta.update(graph_module.meta)
    torch_internals.copy_notes(graph_module, result)
    return result


def retarget(node: torch.fx.Node, device: torch.device) -> None:
    """Change a call that runs on the CPU to run on `device`, where its arguments name the device."""

    def moved(argument: Any) -> Any:
        on_cpu = isinstance(argument, (str, torch.device)) and str(argument) in ("cpu", "cpu:0")
        return device if on_cpu else argument

    if node.op == "call_method" and node.target == "cpu":
        node.target = "to"
        node.args = (node.args[0], device, *node.args[1:])
        return
    # Immutable collections in, immutable collections out: what FX wants of arguments.
    args: Any = torch.fx.node.map_aggregate(node.args, moved)
    kwargs: Any = torch.fx.node.map_aggregate(node.kwargs, moved)
    makes_tensors = node.op == "call_function" and node.target in torch_internals.device_constructors()
    if makes_tensors and kwargs.get("device") is None:
        kwargs = {**kwargs, "device": device}
    node.args, node.kwargs = args, kwargs


def returned(graph_module: torch.fx.GraphModule) -> Sequence[Any]:
    """Return the values that the graph returns, in order."""
    output = next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")
    (values,) = output.args
    return values if isinstance(values, (tuple, list)) else (values,)


def attribute(module: torch.nn.Module, target: Any) -> Any:
    """Return the value that a `get_attr` node of this target reads."""
    value: Any = module
    for part in str(target).split("."):
        value = getattr(value, part)
    return value
