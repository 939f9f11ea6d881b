"""Make the tables of `encore explain`'s results: what stands in the way of CUDA graphs, found without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from suite.explain.records import ExplainedCopy, Explanation, Lowering
from suite.measure.modes import GRAPH_MODE, PLACEMENT_MODE
from suite.report.published import PUBLISHED_VARIANT, Published
from suite.report.runs import FULL_SIZE, row_label
from suite.report.table import Table, make_table
from suite.report.units import NOTHING

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class ExplainTable:
    """Hold a table of explanations; `rows` makes the rows of one of them, under the settings of all."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: Callable[[Explanation, Sequence[str], Published], Iterator[Row]]


def all_tables(explanations: Sequence[Explanation], published: Published) -> tuple[Table, ...]:
    """Make every table of the explanations, in the order of the report."""
    return tuple(table(name, explanations, published) for name in TABLES)


def table(name: str, explanations: Sequence[Explanation], published: Published) -> Table:
    """Make the table of this name; each row begins with what its model is called."""
    of, names = TABLES[name], settings(explanations)
    shares = [f"{setting}_percent" for setting in names] if name == "explain_overview" else []
    rows = (
        {"workload": explanation_label(explanation)} | row
        for explanation in explanations
        for row in of.rows(explanation, names, published)
    )
    note = of.note + (f" {published.caption('grace')}" if name == "explain_obstacles" else "")
    return make_table(name, of.title, note, ["workload", *shares, *of.columns], rows)


def explanation_label(explanation: Explanation) -> str:
    """Return what the row of an explanation is called, as in the tables of runs."""
    return row_label(explanation.target, explanation.variant, explanation.size)


def settings(explanations: Sequence[Explanation]) -> tuple[str, ...]:
    """Return settings that models were lowered under (the modes that use them), in the order of their first
    appearance."""
    return tuple(
        dict.fromkeys(one.setting for item in explanations for graph in item.graphs for one in graph.lowerings)
    )


def lowerings_of(explanation: Explanation, setting: str) -> list[Lowering]:
    """Return the lowering of each FX graph under this setting; empty unless every graph has one, as parts give no
    total.

    Those of backward graphs are among them. One that is missing is in the explanation's limits.
    """
    found = _forwards_of(explanation, setting)
    return [*found, *explanation.backwards(setting)] if found else []


def _forwards_of(explanation: Explanation, setting: str) -> list[Lowering]:
    found = explanation.forwards(setting)
    return found if len(found) == len(explanation.graphs) else []


def is_as_published(explanation: Explanation) -> bool:
    """Return whether published numbers may stand next to this: the published program in full size."""
    return explanation.variant in (None, PUBLISHED_VARIANT) and explanation.size == FULL_SIZE


def total_bytes(copies: Sequence[ExplainedCopy]) -> int | None:
    """Return bytes of all these copies; None if the size of one is not known."""
    sizes = [copy.copied_bytes for copy in copies if copy.copied_bytes is not None]
    return sum(sizes) if len(sizes) == len(copies) else None


def _overview_rows(explanation: Explanation, names: Sequence[str], _: Published) -> Iterator[Row]:
    row: Row = {}
    if explanation.error and not explanation.graphs:
        yield row
        return
    for name in names:
        parts = lowerings_of(explanation, name)
        inside, outside = sum(one.kernels_in_graphs for one in parts), sum(one.kernels_outside for one in parts)
        row[f"{name}_percent"] = 100 * inside / (inside + outside) if inside + outside else None
    placed = [graph.placement for graph in explanation.graphs]
    yield row | {
        "graph_breaks": len(explanation.breaks),
        "host_waits": sum(copy.blocking for copy in explanation.host_to_device),
        "host_waits_placed": sum(each.blocking_copies for each in placed if each is not None) if all(placed) else None,
        "non_static_input_bytes": sum(graph.non_static_input_bytes for graph in explanation.graphs),
    }


def _obstacle_rows(explanation: Explanation, _: Sequence[str], published: Published) -> Iterator[Row]:
    row: Row = {"task": explanation.task, "batch": explanation.batch, "error": explanation.error}
    if is_as_published(explanation):
        row |= {
            "grace_bytes": published.copied_bytes("grace", explanation.target),
            "grace_stock_percent": published.coverage("grace", explanation.target, "stock"),
            "grace_placement_percent": published.coverage("grace", explanation.target, "placement"),
        }
    graphs = explanation.graphs
    if explanation.error and not graphs:
        yield row
        return
    kinds = Counter(node.kind for graph in graphs for node in graph.cpu_nodes)
    transfers = explanation.host_to_device
    yield row | {
        "fx_graphs": len(graphs),
        "graph_breaks": len(explanation.breaks),
        "operations": sum(graph.operations for graph in graphs),
        "cpu_nodes": kinds.total(),
        "cpu_constants": kinds["constant"],
        "cpu_attributes": kinds["attribute"],
        "cpu_arguments": kinds["argument"],
        "cpu_outputs": kinds["output"],
        "host_to_device_copies": len(transfers),
        "blocking_copies": sum(copy.blocking for copy in transfers),
        "cpu_scalars": sum(copy.kind == "scalar" for graph in graphs for copy in graph.copies),
        "host_to_device_bytes": total_bytes(transfers),
        "non_static_input_bytes": sum(graph.non_static_input_bytes for graph in graphs),
        "stock_captures": _captures_text([graph.stock_captures for graph in graphs]),
    }


def _placement_rows(explanation: Explanation, _: Sequence[str], published: Published) -> Iterator[Row]:
    graphs = explanation.graphs
    if not any(graph.cpu_nodes for graph in graphs):
        return
    transfers = explanation.host_to_device
    row: Row = {
        "cpu_nodes": sum(node.kind != "output" for graph in graphs for node in graph.cpu_nodes),
        "host_to_device_copies": len(transfers),
        "blocking_copies": sum(copy.blocking for copy in transfers),
    }
    for column, setting in (("partitions", GRAPH_MODE), ("partitions_placed", PLACEMENT_MODE)):
        parts = lowerings_of(explanation, setting)
        row[column] = sum(part.partitions for part in parts) if parts else None
    placed = [graph.placement for graph in graphs if graph.placement is not None]
    if len(placed) < len(graphs):
        yield row
        return
    forms = Counter(value.form for each in placed for value in each.values)
    yield row | {
        "cpu_nodes_placed": sum(each.cpu_nodes for each in placed),
        "copies_placed": sum(each.copies for each in placed),
        "blocking_copies_placed": sum(each.blocking_copies for each in placed),
        "values_kept": forms["kept"],
        "values_in_graph": forms["literal"] + forms["rebuilt"],
        "values_staged": forms["staged"],
        "cpu_outputs": forms["cpu output"],
        "nodes_left": sum(len(each.left) for each in placed),
    }


def _captures_text(captures: Sequence[bool | None]) -> str:
    """Write "3 of 4", with the number that cannot be told."""
    if not captures:
        return NOTHING
    unknown = sum(answer is None for answer in captures)
    if unknown == len(captures):
        return "cannot be told"
    text = f"{sum(answer is True for answer in captures)} of {len(captures)}"
    return f"{text}, {unknown} unknown" if unknown else text


def _left_rows(explanation: Explanation, _: Sequence[str], published: Published) -> Iterator[Row]:
    placed = [graph.placement for graph in explanation.graphs if graph.placement is not None]
    equal = Counter((left.operation, left.reason, left.source_line) for each in placed for left in each.left)
    for (operation, reason, line), count in equal.items():
        yield {"operation": operation, "reason": reason, "source_line": line, "nodes": count}


def _cpu_node_rows(explanation: Explanation, _: Sequence[str], published: Published) -> Iterator[Row]:
    equal = Counter(
        (node.kind, node.operation, None if node.shape is None else str(list(node.shape)), node.dtype, node.source_line)
        for graph in explanation.graphs
        for node in graph.cpu_nodes
    )
    names = ("kind", "operation", "shape", "dtype", "source_line")
    for values, count in equal.items():
        yield dict(zip(names, values, strict=True)) | {"nodes": count}


def _limit_rows(explanation: Explanation, _: Sequence[str], published: Published) -> Iterator[Row]:
    for text in [*explanation.limits, *([f"failed: {explanation.error}"] if explanation.error else [])]:
        yield {"limit": text}


def _lowering_rows(explanation: Explanation, names: Sequence[str], _: Published) -> Iterator[Row]:
    found = []
    for name in names:
        found += [(name, _forwards_of(explanation, name)), (f"{name}, backward", explanation.backwards(name))]
    for setting, parts in found:
        if not parts:
            continue
        sums = {column: sum(getattr(one, column) for one in parts) for column in _SUMMED}
        total = sums["kernels_in_graphs"] + sums["kernels_outside"]
        share = 100 * sums["kernels_in_graphs"] / total if total else None
        targets = ", ".join(dict.fromkeys(one.target for one in parts))
        yield {"setting": setting, "target": targets, **sums, "in_graphs_percent": share}


def _uncaptured_rows(explanation: Explanation, _: Sequence[str], published: Published) -> Iterator[Row]:
    totals: Counter[tuple[str, str, str | None]] = Counter()
    for graph in explanation.graphs:
        for direction, lowered in (("", graph.lowerings), (", backward", graph.backward)):
            for lowering in lowered:
                setting = f"{lowering.setting}{direction}"
                for left in lowering.not_captured:
                    totals[setting, left.reason, left.source_line] += left.count
                totals.update((setting, f"captured once only: {reason}", None) for reason in lowering.captured_once)
    totals.update(("graph break", one.reason, one.source_line) for one in explanation.breaks)
    for (setting, reason, line), count in totals.items():
        yield {"setting": setting, "reason": reason, "source_line": line, "count": count}


_SUMMED = (
    "partitions", "kernels_in_graphs", "kernels_outside", "cpu_kernels", "host_to_device_copies", "blocking_copies",
)  # fmt: skip
_OBSTACLES = (
    "task", "batch", "fx_graphs", "graph_breaks", "operations", "cpu_nodes", "cpu_constants", "cpu_attributes",
    "cpu_arguments", "cpu_outputs", "cpu_scalars", "host_to_device_copies", "blocking_copies", "host_to_device_bytes",
    "non_static_input_bytes", "grace_bytes", "stock_captures", "grace_stock_percent", "grace_placement_percent",
    "error",
)  # fmt: skip
_PLACED = (
    "cpu_nodes", "cpu_nodes_placed", "host_to_device_copies", "copies_placed", "blocking_copies",
    "blocking_copies_placed", "partitions", "partitions_placed", "values_kept", "values_in_graph", "values_staged",
    "cpu_outputs", "nodes_left",
)  # fmt: skip

TABLES: dict[str, ExplainTable] = {
    "explain_overview": ExplainTable(
        "Kernels inside CUDA graphs",
        "Share of the FX graphs' kernels that would be inside CUDA graphs, by offline lowering: graph is stock "
        "PyTorch, graph-unpartitioned the same with graph_partition=False, placement Encore's. What runs between FX "
        "graphs, after a graph break, is not counted and never captured. host waits: host-to-device copies for which "
        "the host waits in each call, as the program is written and after placement. non-static inputs: data that "
        "stock CUDA graphs copy before each replay.",
        ("graph_breaks", "host_waits", "host_waits_placed", "non_static_input_bytes"),
        _overview_rows,
    ),
    "explain_obstacles": ExplainTable(
        "What stands in the way of CUDA graphs",
        "Per call. CPU nodes: values in the FX graphs that live on the CPU; CPU scalars: those of rank 0 that GPU "
        "operations take by value. non-static inputs: data that stock CUDA "
        "graphs copy before each replay; next to it GraCE's bytes before indirection. stock captures: FX graphs whose "
        "kernels stock would capture in full; next to it GraCE's measured coverage, stock PyTorch 2.4 and after "
        "placement.",
        _OBSTACLES,
        _obstacle_rows,
    ),
    "explain_lowerings": ExplainTable(
        "What Inductor makes of it",
        "Lowered offline for the target. partitions: pieces that would become CUDA graphs. CPU kernels and copies are "
        "those of one call. Only kernels of FX graphs are seen: what runs between them, after a graph break, is not in "
        "these counts and is never in a CUDA graph. A model without a row could not be lowered in full. Backward "
        "graphs have rows of their own.",
        ("setting", "target", *_SUMMED[:3], "in_graphs_percent", *_SUMMED[3:]),
        _lowering_rows,
    ),
    "explain_placement": ExplainTable(
        "What placement changes",
        "Per call, as the program is written, scalars passed by value left out; `placed`: after Encore's placement. "
        "partitions: pieces that would become CUDA graphs. Values are kept on the GPU and refreshed when they change, "
        "made in the graph (as literals, or rebuilt), or staged with each call in one asynchronous copy per FX graph; "
        "nodes left are in the table of what stays where it is. Models without a CPU node are left out.",
        _PLACED,
        _placement_rows,
    ),
    "explain_cpu_nodes": ExplainTable(
        "Values on the CPU, and where they come from",
        "Equal nodes of a model are counted together.",
        ("kind", "operation", "shape", "dtype", "source_line", "nodes"),
        _cpu_node_rows,
    ),
    "explain_not_captured": ExplainTable(
        "Not captured, and why",
        "Inductor's reasons per setting, and Dynamo's graph breaks: what lies between FX graphs is never captured. "
        "Captured once only: Encore then copies inputs whose uses the generated code does not name.",
        ("setting", "reason", "source_line", "count"),
        _uncaptured_rows,
    ),
    "explain_left": ExplainTable(
        "Left where it is, and why",
        "Nodes on the CPU, or reading from there, that placement does not move. Equal ones are counted together.",
        ("operation", "reason", "source_line", "nodes"),
        _left_rows,
    ),
    "explain_limits": ExplainTable(
        "What this analysis cannot see",
        "A model listed here may have more obstacles than the tables above show.",
        ("limit",),
        _limit_rows,
    ),
}
"""Tables of what stands in the way of CUDA graphs, by name, in the order of the report."""
