"""One FX graph after Encore's placement: what moved, what stays and why, and what Inductor makes of the result.

Nothing is allocated: placement describes what it feeds a graph with and makes it at the first call, which never comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from optimizations.placement import Placement
from optimizations.report import PlacementReport
from suite.explain.fx_graph import short_source_line
from suite.explain.lowering import LoweredPair
from suite.explain.records import LeftInPlace, Placed, PlacedForm, PlacedValue
from suite.measure.modes import GRAPH_MODE, MODES

Lower = Callable[..., LoweredPair]
"""Lowers a graph with inputs under `options`, as `lowering.lower_pair` does."""


def lower_placed(
    placement: Placement, example_inputs: Sequence[Any], stock: LoweredPair | None, lower: Lower
) -> LoweredPair:
    """What Inductor makes of a graph after placement, under the options of stock CUDA graphs.

    `example_inputs` are those of the graph before placement, and `stock` its outcome without placement, which is also
    that of a graph that placement leaves untouched.

    Raises:
        LoweringFailed: as `lower` does.
    """
    if placement.feeds is None and stock is not None:
        return stock
    inputs = placement.example_inputs(example_inputs)
    return lower(placement.graph_module, inputs, options=MODES[GRAPH_MODE].options)


def placed(graph_module: torch.fx.GraphModule, report: PlacementReport) -> Placed:
    """The record of a placement of `graph_module`, the graph before it."""
    lines = {node.name: short_source_line(node) for node in graph_module.graph.nodes}
    blocking = sum(copy.blocking for copy in report.copies_after)
    return Placed(
        untouched=report.untouched,
        cpu_nodes=len(report.cpu_nodes_after),
        copies=blocking + staging_copies(report),
        blocking_copies=blocking,
        values=list(_values(report, lines)),
        left=[
            LeftInPlace(node=left.node, operation=left.operation, reason=left.reason, source_line=lines.get(left.node))
            for left in report.left
        ],
    )


def staging_copies(report: PlacementReport) -> int:
    """Host-to-device copies that placement itself makes in each call: one for all staged arguments together."""
    return 1 if report.staged else 0


def _values(report: PlacementReport, lines: Mapping[str, str | None]) -> Iterator[PlacedValue]:
    found: list[tuple[str, PlacedForm, int | None]] = [
        *((hoisted.node, hoisted.form, hoisted.hoisted_bytes) for hoisted in report.hoisted),
        *((staged.node, "staged", staged.staged_bytes) for staged in report.staged),
        *((node, "cpu output", None) for node in report.cpu_outputs),
    ]
    for node, form, value_bytes in found:
        yield PlacedValue(node=node, form=form, value_bytes=value_bytes, source_line=lines.get(node))
