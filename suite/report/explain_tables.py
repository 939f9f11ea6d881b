"""Make the tables of `encore explain`'s results: obstacles to CUDA graphs, found without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from suite.explain.records import Explanation, Lowering
from suite.report.published import PUBLISHED_VARIANT, Published
from suite.report.runs import FULL_SIZE, row_label
from suite.report.table import Table, make_table

Row = dict[str, object]


def all_tables(explanations: Sequence[Explanation], published: Published) -> tuple[Table, ...]:
    """Make every table of the explanations, in the order of the report; each row begins with its model's label."""
    names = settings(explanations)
    labelled = [({"workload": explanation_label(one)}, one) for one in explanations]
    return (
        make_table(
            "explain_overview",
            "Kernels inside CUDA graphs",
            "Share of the FX graphs' kernels that would be inside CUDA graphs, by offline lowering: graph is stock "
            "PyTorch, graph-unpartitioned the same with graph_partition=False, placement Encore's; next to it what "
            "GraCE measured. What runs between FX graphs, after a graph break, is not counted and never captured. "
            "host waits: host-to-device copies for which the host waits in each call, as the program is written and "
            "after placement. CPU nodes: values in the FX graphs that live on the CPU. non-static inputs: data that "
            f"stock CUDA graphs copy before each replay. Published values from {published.sources['grace'].setting}.",
            (label | _overview(one, names, published) for label, one in labelled),
        ),
        make_table(
            "explain_cpu_nodes",
            "Values on the CPU, and where they come from",
            "Equal nodes of a model are counted together.",
            (label | row for label, one in labelled for row in _cpu_nodes(one)),
        ),
        make_table(
            "explain_not_captured",
            "Not captured, and why",
            "Inductor's reasons per setting, and Dynamo's graph breaks: what lies between FX graphs is never captured. "
            "Captured once only: Encore then copies inputs whose uses the generated code does not name. left: nodes "
            "that placement leaves on the CPU. limit: what this analysis cannot see; there may be more obstacles.",
            (label | row for label, one in labelled for row in _reasons(one)),
        ),
    )


def explanation_label(explanation: Explanation) -> str:
    """Return the label of an explanation's row, as in the tables of runs."""
    return row_label(explanation.target, explanation.variant, explanation.size)


def settings(explanations: Sequence[Explanation]) -> tuple[str, ...]:
    """Return settings that models were lowered under (the modes that use them), in the order of their first
    appearance."""
    return tuple(
        dict.fromkeys(one.setting for item in explanations for graph in item.graphs for one in graph.lowerings)
    )


def lowerings_of(explanation: Explanation, setting: str) -> list[Lowering]:
    """Return the lowering of each FX graph under this setting; nothing unless every graph has one.

    The total would otherwise be incomplete. Lowerings of backward graphs are included; missing ones are listed in the
    explanation's limits.
    """
    found = explanation.forwards(setting)
    whole = found and len(found) == len(explanation.graphs)
    return [*found, *explanation.backwards(setting)] if whole else []


def is_as_published(explanation: Explanation) -> bool:
    """Return whether this is the published program in full size, which published numbers apply to."""
    return explanation.variant in (None, PUBLISHED_VARIANT) and explanation.size == FULL_SIZE


def _overview(explanation: Explanation, names: Sequence[str], published: Published) -> Row:
    graphs = explanation.graphs
    if explanation.error and not graphs:
        return {}
    row: Row = {}
    for name in names:
        parts = lowerings_of(explanation, name)
        inside, outside = sum(one.kernels_in_graphs for one in parts), sum(one.kernels_outside for one in parts)
        row[f"{name}_percent"] = 100 * inside / (inside + outside) if inside + outside else None
    placed = [graph.placement for graph in graphs]
    row |= {
        "graph_breaks": len(explanation.breaks),
        "host_waits": sum(copy.blocking for copy in explanation.host_to_device),
        "host_waits_placed": sum(each.blocking_copies for each in placed if each is not None) if all(placed) else None,
        "cpu_nodes": sum(len(graph.cpu_nodes) for graph in graphs),
        "non_static_input_bytes": sum(graph.non_static_input_bytes for graph in graphs),
    }
    if is_as_published(explanation):
        covered = published.coverage_percent["grace"].get(explanation.target, {})
        for system in ("stock", "placement"):
            row[f"grace_{system}_percent"] = covered.get(system)
    return row


def _cpu_nodes(explanation: Explanation) -> Iterator[Row]:
    equal = Counter(
        (node.kind, node.operation, None if node.shape is None else str(list(node.shape)), node.dtype, node.source_line)
        for graph in explanation.graphs
        for node in graph.cpu_nodes
    )
    names = ("kind", "operation", "shape", "dtype", "source_line")
    for values, count in equal.items():
        yield dict(zip(names, values, strict=True)) | {"nodes": count}


def _reasons(explanation: Explanation) -> Iterator[Row]:
    totals: Counter[tuple[str, str, str | None]] = Counter()
    for graph in explanation.graphs:
        for direction, lowered in (("", graph.lowerings), (", backward", graph.backward)):
            for lowering in lowered:
                setting = f"{lowering.setting}{direction}"
                for left in lowering.not_captured:
                    totals[setting, left.reason, left.source_line] += left.count
        if graph.placement is not None:
            totals.update(("left", f"{one.operation}: {one.reason}", one.source_line) for one in graph.placement.left)
    totals.update(("graph break", one.reason, one.source_line) for one in explanation.breaks)
    totals.update(("limit", text, None) for text in explanation.limits)
    if explanation.error:
        totals["failed", explanation.error, None] += 1
    for (setting, reason, line), count in totals.items():
        yield {"setting": setting, "reason": reason, "source_line": line, "count": count}
