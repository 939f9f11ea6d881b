"""What one FX graph, as Dynamo hands it to a backend, keeps on the CPU and brings to the GPU in each call.

Where values live is what the backend's own analysis says (`optimizations.placement.residency_of`). Nothing is lowered
or changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from models.instance import tensors_of
from optimizations import torch_internals
from optimizations.placement import residency_of
from optimizations.placement.observe import CannotObserve
from optimizations.placement.residency import Residency, ResidentNode, source_line
from suite.explain.records import CpuKind, ExplainedCopy, ExplainedCpuNode, FxGraph, NonStaticInput
from suite.measure.source_line import short_line


def read_fx_graph(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], index: int
) -> tuple[FxGraph, str | None]:
    """The record of the graph that Dynamo made as number `index`, without lowerings.

    Also why it is not known where its values live, if so; the record then has no CPU nodes and copies.
    """
    nodes = list(graph_module.graph.nodes)
    inputs = [_input(node) for node in nodes if _is_non_static_input(node)]
    residency, unknown = _residency(graph_module, example_inputs)
    record = FxGraph(
        index=index,
        operations=sum(node.op.startswith("call_") for node in nodes),
        cpu_nodes=[] if residency is None else list(_cpu_nodes(residency)),
        copies=[] if residency is None else list(_copies(residency)),
        non_static_inputs=inputs,
        non_static_input_bytes=sum(entry.input_bytes or 0 for entry in inputs),
        stock_captures=None,
        lowerings=[],
    )
    return record, unknown


def _residency(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[Residency | None, str | None]:
    noted = (node.meta.get("example_value") for node in graph_module.graph.nodes)
    if not any(tensor.device.type == "cpu" for value in noted for tensor in tensors_of(value)):
        return None, None
    try:
        return residency_of(graph_module, example_inputs), None
    except CannotObserve as error:
        return None, str(error)


def _cpu_nodes(residency: Residency) -> Iterator[ExplainedCpuNode]:
    for node in residency.cpu_nodes():
        yield _cpu_node(node, residency.kind(node))
    for name in residency.returned:
        if residency.nodes[name].on_cpu and residency.nodes[name].tensors:
            yield _cpu_node(residency.nodes[name], "output")


def _cpu_node(node: ResidentNode, kind: CpuKind) -> ExplainedCpuNode:
    sizes = [size for size in node.shape or () if isinstance(size, int)]
    static = node.shape is not None and len(sizes) == len(node.shape)
    return ExplainedCpuNode(
        node=node.name,
        operation=node.operation,
        kind=kind,
        shape=sizes if static else None,  # None too where a size depends on the call
        dtype=node.dtype,
        source_line=_short(node.source_line),
    )


def _copies(residency: Residency) -> Iterator[ExplainedCopy]:
    for copy in residency.copies():
        yield ExplainedCopy(
            node=copy.node,
            kind=copy.kind,
            copied_bytes=copy.copied_bytes,
            blocking=copy.blocking,
            source_line=_short(copy.source_line),
        )


def short_source_line(node: torch.fx.Node) -> str | None:
    """The user's line behind a node, written the same way on every machine."""
    return _short(source_line(node))


def _short(line: str | None) -> str | None:
    return None if line is None else short_line(line)


def _is_non_static_input(node: torch.fx.Node) -> bool:
    on_gpu = any(tensor.device.type == "cuda" for tensor in tensors_of(node.meta.get("example_value")))
    return node.op == "placeholder" and on_gpu and torch_internals.static_input_type(node) is None


def _input(node: torch.fx.Node) -> NonStaticInput:
    tensors = list(tensors_of(node.meta["example_value"]))
    static = all(isinstance(size, int) for tensor in tensors for size in tensor.shape)
    first = tensors[0]
    return NonStaticInput(
        node=node.name,
        shape=[int(size) for size in first.shape] if static else None,
        dtype=str(first.dtype).removeprefix("torch."),
        input_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors) if static else None,
    )
