"""Write an explanation as text for a terminal or a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from optimizations.byte_units import format_bytes
from optimizations.report import Copy
from suite.explain.records import TO_THE_END, Explanation, FxGraph, Lowering
from suite.measure.modes import GRAPH_MODE

MOST_ROWS = 16
"""Longer lists are truncated; the files of `--out` have all entries."""


def render(explanation: Explanation) -> RenderableType:
    """Return the whole explanation, for `rich.console.Console.print`."""
    return Group(*_parts(explanation))


def summary(explanation: Explanation) -> str:
    """Summarize the explanation, or its error, in one line."""
    if explanation.error is not None and not explanation.graphs:
        return f"failed: {explanation.error.splitlines()[0]}"
    stock = [one for graph in explanation.graphs for one in graph.of(GRAPH_MODE)]
    lowered = bool(stock) and len(stock) == len(explanation.graphs)
    inside = sum(lowering.kernels_in_graphs for lowering in stock)
    total = inside + sum(lowering.kernels_outside for lowering in stock)
    reports = [graph.placement for graph in explanation.graphs]
    nodes = sum(len(one.cpu_nodes_before) for one in reports)
    nodes_after = sum(len(one.cpu_nodes_after) for one in reports)
    copies, copies_after = _copies(one.copies_before for one in reports), _copies(one.copies_after for one in reports)
    parts = [
        f"{_count(len(explanation.graphs), 'FX graph')}",
        f"{_count(nodes, 'CPU node')} ({nodes_after} after placement)",
        f"{_count(copies, 'host-to-device copy', 'host-to-device copies')} per call ({copies_after} after placement)",
        f"stock captures {inside} of {total} kernels" if lowered else "not lowered as stock would",
    ]
    seen = f"; {explanation.seen}" if (explanation.seen or TO_THE_END) != TO_THE_END else ""
    return ", ".join(parts) + seen + ("; failed midway" if explanation.error is not None else "")


def _copies(copies: Iterable[Sequence[Copy]]) -> int:
    """Count host-to-device copies; scalars are passed by value."""
    return sum(copy.kind != "scalar" for of_graph in copies for copy in of_graph)


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
        rows = [(times, reason, line) for (reason, line), times in lines.items()]
        yield from _table(("times", "reason", "line"), rows)
    for title, texts in (
        ("Not seen", explanation.limits),
        ("Failed", [explanation.error] if explanation.error else []),
    ):
        if texts:
            yield Text(title, style="bold")
            yield from (_indented(Text(f"- {text}")) for text in texts)


def _graph(graph: FxGraph) -> Iterator[RenderableType]:
    placement = graph.placement
    captured = {True: "captured by stock", False: "not fully captured by stock", None: "capture not known"}
    yield Text()
    yield Text(
        f"FX graph {graph.index}: {_count(graph.operations, 'operation')}, {captured[graph.stock_captures]}, "
        f"{_count(len(graph.non_static_inputs), 'non-static input')} of {format_bytes(graph.non_static_input_bytes)}",
        style="bold",
    )
    yield from _table(
        ("CPU node", "kind", "shape", "dtype", "line"),
        [
            (one.operation, one.kind, _shape(one.shape), one.dtype, one.source_line)
            for one in placement.cpu_nodes_before
        ],
    )
    yield from _table(
        ("host to device", "kind", "bytes", "host waits", "line"),
        [
            (
                one.node,
                one.kind,
                "?" if one.copied_bytes is None else format_bytes(one.copied_bytes),
                "yes" if one.blocking else "no",
                one.source_line,
            )
            for one in placement.copies_before
        ],
    )
    if placement.cpu_nodes_before or placement.left:
        yield Text("  Placement", style="dim")
        yield from (_indented(Text(line)) for line in placement.lines())
    yield from _table(
        ("setting", "CUDA graphs", "kernels in", "kernels out", "CPU kernels", "copies (blocking)", "because"),
        [_lowering_row(lowering) for lowering in graph.lowerings],
    )


def _lowering_row(lowering: Lowering) -> tuple[object, ...]:
    reasons = []
    for each in lowering.not_captured:
        times = f" x{each.count}" if each.count > 1 else ""
        reasons.append(f"{each.reason}{times}" + (f" at {each.source_line}" if each.source_line else ""))
    return (
        lowering.setting,
        lowering.partitions,
        lowering.kernels_in_graphs,
        lowering.kernels_outside,
        lowering.cpu_kernels,
        f"{lowering.host_to_device_copies} ({lowering.blocking_copies})",
        "; ".join(reasons),
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[RenderableType]:
    """Yield a table of these rows, with nothing for None; no table without rows."""
    if rows:
        table = Table(*headings, box=None, pad_edge=False, header_style="dim")
        for row in rows[:MOST_ROWS]:
            table.add_row(*(Text("" if value is None else str(value)) for value in row))
        if len(rows) > MOST_ROWS:
            table.add_row(Text(f"... and {len(rows) - MOST_ROWS} more"))
        yield _indented(table)


def _indented(part: RenderableType) -> RenderableType:
    """Indent `part`, without padding it to the width of the console, which may be a pipe."""
    return Padding(part, (0, 0, 0, 2), expand=False)


def _shape(shape: Sequence[int | str] | None) -> str:
    return "?" if shape is None else f"[{', '.join(map(str, shape))}]"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
