"""GraCE Table 3, PyGraph Table 3: bytes copied for each iteration, before and after indirection."""

from __future__ import annotations

from optimizations.byte_units import format_bytes, parse_bytes
from suite.modes import GRAPH_MODE, INDIRECTION_MODE, PLACEMENT_MODE
from suite.report.chart import Bar, Chart, Scale
from suite.report.paper.exhibit import NOT_MEASURED, Exhibit, Made, Results, chart_or_none, labels_of, reasons
from suite.report.table import make_table

_MODES = (GRAPH_MODE, PLACEMENT_MODE, INDIRECTION_MODE)
_DIFFERS = (
    "Before is the paper's placement without indirection, after its pointers; in the suite placement and indirection. "
    "Library versions decide which outputs take part in differentiation, and with them what training copies. Counted "
    "where the copy is made; the papers' training includes the optimizer, the suite's does not unless asked."
)
_NO_VALUES = " results/published.json holds no value of this table of this paper."


def make(exhibit: Exhibit, results: Results) -> Made:
    """Bytes by workload, with the number of recorded graphs."""
    published = results.published.bytes_copied.get(exhibit.source, {})
    labels = labels_of(results, exhibit.source)
    bars: dict[tuple[str, str], Bar] = {}
    rows = []
    for label in labels:
        paper = published.get(results.published.printed(exhibit.source, label))
        before = parse_bytes(paper.before) if paper else None
        after = parse_bytes(paper.after) if paper else None
        row: dict[str, object] = {
            "workload": label,
            "published_before_bytes": before,
            "published_after_bytes": after,
            "published_graphs": paper.graphs if paper else None,
        }
        whys: dict[str, str | None] = {}
        for mode in _MODES:
            count = _copied(results, label, mode)
            row[f"{mode}_bytes"] = count
            whys[mode] = None if count is not None else results.state(label, mode) or NOT_MEASURED
            mark = {PLACEMENT_MODE: before, INDIRECTION_MODE: after}.get(mode)
            bars[label, mode] = (
                Bar(failure=whys[mode], published=mark)
                if count is None
                else Bar(float(count), published=mark, label=format_bytes(count).replace(".0 ", " ") if count else None)
            )
        cell = results.passed(label, INDIRECTION_MODE)
        row["graphs"] = cell.metrics.graphs.cuda_graphs if cell and cell.metrics and cell.metrics.graphs else None
        row["missing"] = reasons(whys)
        rows.append(row)
    columns = ["workload", f"{GRAPH_MODE}_bytes", f"{PLACEMENT_MODE}_bytes", "published_before_bytes"]
    columns += [f"{INDIRECTION_MODE}_bytes", "published_after_bytes", "graphs", "published_graphs", "missing"]
    title = exhibit.title(results.published)
    chart = Chart(
        exhibit.stem,
        title,
        "bytes per iteration",
        Scale.BYTES,
        labels,
        _MODES,
        bars,
        published=f"before and after indirection, {results.published.sources[exhibit.source].setting}",
    )
    note = exhibit.note(results) + ("" if published else _NO_VALUES)
    table = make_table(exhibit.stem, title, note, columns, rows)
    return Made(table, chart_or_none(chart), results.provenance())


def _copied(results: Results, label: str, mode: str) -> int | None:
    cell = results.passed(label, mode)
    copies = cell.metrics.copies if cell and cell.metrics else None
    if copies is None or copies.placeholder_bytes is None:
        return None
    return copies.placeholder_bytes + (copies.pointer_bytes or 0)


EXHIBITS = (
    Exhibit("table3", "grace", "Table 3", "bytes copied, before and after indirection", _DIFFERS, make),
    Exhibit("pygraph-table3", "pygraph", "Table 3", "bytes copied, before and after indirection", _DIFFERS, make),
)
