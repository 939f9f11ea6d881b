"""Write an explanation as text for a terminal or a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from optimizations.byte_units import format_bytes
from suite.explain.records import (
    TO_THE_END,
    ExplainedCopy,
    ExplainedCpuNode,
    Explanation,
    FxGraph,
    Lowering,
    Placed,
    PlacedValue,
)
from suite.measure.modes import GRAPH_MODE

MOST_ROWS = 16
"""Longer lists are truncated; the JSON output has all entries."""


def render(explanation: Explanation) -> RenderableType:
    """Return the whole explanation, for `rich.console.Console.print`."""
    return Group(*_parts(explanation))


def summary(explanation: Explanation) -> str:
    """Summarize the explanation, or its error, in one line."""
    if explanation.error is not None and not explanation.graphs:
        return f"failed: {explanation.error.splitlines()[0]}"
    stock, backward = explanation.forwards(GRAPH_MODE), explanation.backwards(GRAPH_MODE)
    lowered = bool(stock) and len(stock) == len(explanation.graphs)
    captured = _captured(stock) + (f" and {_captured(backward)} of the backward" if backward else "")
    copies = len(explanation.host_to_device)
    placed = [graph.placement for graph in explanation.graphs if graph.placement is not None]
    nodes_after = f" ({sum(each.cpu_nodes for each in placed)} after placement)" if placed else ""
    copies_after = f" ({sum(each.copies for each in placed)} after placement)" if placed else ""
    parts = [
        f"{_count(len(explanation.graphs), 'FX graph')}",
        f"{_count(explanation.cpu_nodes, 'CPU node')}{nodes_after}",
        f"{_count(copies, 'host-to-device copy', 'host-to-device copies')} per call{copies_after}",
        f"stock captures {captured}" if lowered else "not lowered as stock would",
    ]
    seen = f"; {explanation.seen}" if (explanation.seen or TO_THE_END) != TO_THE_END else ""
    return ", ".join(parts) + seen + ("; failed midway" if explanation.error is not None else "")


def _captured(lowerings: Sequence[Lowering]) -> str:
    inside = sum(lowering.kernels_in_graphs for lowering in lowerings)
    total = inside + sum(lowering.kernels_outside for lowering in lowerings)
    return f"{inside} of {total} kernels"


def _parts(explanation: Explanation) -> Iterator[RenderableType]:
    batch = "" if explanation.batch is None else f", batch {explanation.batch}"
    variant = "" if explanation.variant is None else f" ({explanation.variant})"
    size = "" if explanation.size == "full" else f", {explanation.size} size"
    seen = "" if explanation.seen is None else f": {explanation.seen}"
    yield Text(
        f"{explanation.target}{variant}: {explanation.task}{batch}{size}, PyTorch {explanation.torch}{seen}",
        style="bold",
    )
    yield Text(summary(explanation))
    for graph in explanation.graphs:
        yield from _graph(graph)
    if explanation.breaks:
        yield Text("Graph breaks", style="bold")
        lines = Counter((each.reason, each.source_line) for each in explanation.breaks)
        yield _table(
            ("times", "reason", "line"),
            [(str(times), reason, line or "") for (reason, line), times in lines.items()],
        )
    for title, texts in (
        ("Not seen", explanation.limits),
        ("Failed", [explanation.error] if explanation.error else []),
    ):
        if texts:
            yield Text(title, style="bold")
            yield from (_indented(Text(f"- {text}")) for text in texts)


def _graph(graph: FxGraph) -> Iterator[RenderableType]:
    captured = {True: "captured by stock", False: "not fully captured by stock", None: "capture not known"}
    yield Text()
    yield Text(
        f"FX graph {graph.index}: {_count(graph.operations, 'operation')}, {captured[graph.stock_captures]}, "
        f"{_count(len(graph.non_static_inputs), 'non-static input')} of {format_bytes(graph.non_static_input_bytes)}",
        style="bold",
    )
    if graph.cpu_nodes:
        yield _table(("CPU node", "kind", "shape", "dtype", "line"), [_cpu_row(node) for node in graph.cpu_nodes])
    if graph.copies:
        yield _table(
            ("host to device", "kind", "bytes", "host waits", "line"), [_copy_row(copy) for copy in graph.copies]
        )
    if graph.placement is not None:
        yield from _placement(graph.placement)
    if graph.lowerings:
        yield _table(
            ("setting", "CUDA graphs", "kernels in", "kernels out", "CPU kernels", "copies (blocking)", "because"),
            [
                *(_lowering_row(lowering) for lowering in graph.lowerings),
                *(_lowering_row(lowering, ", backward") for lowering in graph.backward),
            ],
        )


def _placement(placement: Placed) -> Iterator[RenderableType]:
    if placement.untouched is not None:
        yield _indented(Text(f"placement leaves it as it is: {placement.untouched}"))
    else:
        copies = _count(placement.copies, "host-to-device copy", "host-to-device copies")
        remain = f"{_count(placement.cpu_nodes, 'CPU node')} and {copies} ({placement.blocking_copies} blocking)"
        yield _indented(Text(f"after placement {remain} remain"))
    if placement.values:
        yield _table(("copied to the GPU", "how", "bytes", "line"), [_value_row(value) for value in placement.values])
    if placement.left:
        yield _table(
            ("left where it is", "operation", "because", "line"),
            [(left.node, left.operation, left.reason, left.source_line or "") for left in placement.left],
        )


def _value_row(value: PlacedValue) -> tuple[str, ...]:
    size = "" if value.value_bytes in (None, 0) else format_bytes(value.value_bytes or 0)
    return (value.node, value.form, size, value.source_line or "")


def _cpu_row(node: ExplainedCpuNode) -> tuple[str, ...]:
    return (node.operation, node.kind, _shape(node.shape), node.dtype or "", node.source_line or "")


def _copy_row(copy: ExplainedCopy) -> tuple[str, ...]:
    size = "?" if copy.copied_bytes is None else format_bytes(copy.copied_bytes)
    return (copy.node, copy.kind, size, "yes" if copy.blocking else "no", copy.source_line or "")


def _lowering_row(lowering: Lowering, direction: str = "") -> tuple[str, ...]:
    reasons = []
    for each in lowering.not_captured:
        times = f" x{each.count}" if each.count > 1 else ""
        reasons.append(f"{each.reason}{times}" + (f" at {each.source_line}" if each.source_line else ""))
    return (
        f"{lowering.setting}{direction}",
        str(lowering.partitions),
        str(lowering.kernels_in_graphs),
        str(lowering.kernels_outside),
        str(lowering.cpu_kernels),
        f"{lowering.host_to_device_copies} ({lowering.blocking_copies})",
        "; ".join(reasons),
    )


def _table(headings: Sequence[str], rows: Sequence[tuple[str, ...]]) -> RenderableType:
    table = Table(*headings, box=None, pad_edge=False, header_style="dim")
    for row in rows[:MOST_ROWS]:
        table.add_row(*map(Text, row))
    if len(rows) > MOST_ROWS:
        table.add_row(Text(f"... and {len(rows) - MOST_ROWS} more"))
    return _indented(table)


def _indented(part: RenderableType) -> RenderableType:
    """Indent `part`, without padding it to the width of the console, which may be a pipe."""
    return Padding(part, (0, 0, 0, 2), expand=False)


def _shape(shape: list[int] | None) -> str:
    return "?" if shape is None else f"[{', '.join(map(str, shape))}]"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
