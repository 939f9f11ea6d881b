"""Find the CPU values and host-to-device copies of one FX graph, as Dynamo passes it to a backend.

The backend's analysis determines the device of each value (`optimizations.placement.residency_of`). The second half
does the same after Encore's placement: it lists moved nodes, nodes left on the CPU with reasons, and Inductor's
outcome. Nothing is allocated: placement allocates a graph's new inputs at its first call, and no graph is called here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from models.instance import tensors_of
from optimizations import torch_internals
from optimizations.placement import CannotObserve, Placement, Residency, ResidentNode, residency_of, source_line
from optimizations.report import PlacementReport
from suite.explain.lowering import LoweredPair
from suite.explain.records import (
    CpuKind,
    ExplainedCopy,
    ExplainedCpuNode,
    FxGraph,
    LeftInPlace,
    NonStaticInput,
    Placed,
    PlacedForm,
    PlacedValue,
)
from suite.measure.modes import GRAPH_MODE, MODES
from suite.measure.source_line import short_line


def read_fx_graph(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], index: int
) -> tuple[FxGraph, str | None]:
    """Return the record of Dynamo's graph number `index`, without lowerings.

    Also return the reason if the devices of its values are unknown; the record then has no CPU nodes and copies.
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
    returned = (residency.nodes[name] for name in residency.returned)
    found: list[tuple[ResidentNode, CpuKind]] = [
        *((node, residency.kind(node)) for node in residency.cpu_nodes()),
        *((node, "output") for node in returned if node.on_cpu and node.tensors),
    ]
    for node, kind in found:
        sizes = [size for size in node.shape or () if isinstance(size, int)]
        static = node.shape is not None and len(sizes) == len(node.shape)
        yield ExplainedCpuNode(
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


def lower_placed(
    placement: Placement, example_inputs: Sequence[Any], stock: LoweredPair | None, lower: Callable[..., LoweredPair]
) -> LoweredPair:
    """Return Inductor's outcome for a graph after placement, under the options of stock CUDA graphs.

    `example_inputs` are those of the graph before placement. `stock` is its outcome without placement; it is returned
    if placement leaves the graph untouched.

    Raises:
        LoweringFailed: as `lower` does.
    """
    if placement.feeds is None and stock is not None:
        return stock
    inputs = placement.example_inputs(example_inputs)
    return lower(placement.graph_module, inputs, options=MODES[GRAPH_MODE].options)


def placed(graph_module: torch.fx.GraphModule, report: PlacementReport) -> Placed:
    """Return the record of a placement of `graph_module`, the graph before it."""
    lines = {node.name: _short(source_line(node)) for node in graph_module.graph.nodes}
    blocking = sum(copy.blocking for copy in report.copies_after)
    return Placed(
        untouched=report.untouched,
        cpu_nodes=len(report.cpu_nodes_after),
        copies=blocking + bool(report.staged),  # placement copies all staged arguments at once
        blocking_copies=blocking,
        values=list(_values(report, lines)),
        left=[
            LeftInPlace(node=left.node, operation=left.operation, reason=left.reason, source_line=lines.get(left.node))
            for left in report.left
        ],
    )


def _values(report: PlacementReport, lines: Mapping[str, str | None]) -> Iterator[PlacedValue]:
    found: list[tuple[str, PlacedForm, int | None]] = [
        *((hoisted.node, hoisted.form, hoisted.hoisted_bytes) for hoisted in report.hoisted),
        *((staged.node, "staged", staged.staged_bytes) for staged in report.staged),
        *((node, "cpu output", None) for node in report.cpu_outputs),
    ]
    for node, form, value_bytes in found:
        yield PlacedValue(node=node, form=form, value_bytes=value_bytes, source_line=lines.get(node))
