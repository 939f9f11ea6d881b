"""GraCE Table 2, PyGraph Table 2: share of kernels that CUDA graphs launch, before and after placement."""

from __future__ import annotations

from suite.modes import GRAPH_MODE, INDIRECTION_MODE, PLACEMENT_MODE, UNPARTITIONED_MODE
from suite.report.chart import Bar, Chart, Scale
from suite.report.paper.exhibit import NOT_MEASURED, Exhibit, Made, Results, chart_or_none, labels_of, reasons
from suite.report.table import make_table

_MODES = (UNPARTITIONED_MODE, GRAPH_MODE, PLACEMENT_MODE, INDIRECTION_MODE)
_DIFFERS = (
    f"The paper's stock is {UNPARTITIONED_MODE}. A copy of inputs that is a kernel counts as one outside of graphs, in "
    "the papers too. Today's kernels are others and fewer: only the shares can be set side by side."
)


def make(exhibit: Exhibit, results: Results) -> Made:
    """The paper's rows, with every mode of the suite that uses CUDA graphs."""
    published = results.published.coverage_percent[exhibit.source]
    labels = [label for label in labels_of(results, exhibit.source) if _printed(results, exhibit, label) in published]
    bars: dict[tuple[str, str], Bar] = {}
    rows = []
    for label in labels:
        paper = published[_printed(results, exhibit, label)]
        row: dict[str, object] = {
            "workload": label,
            "stock_published_percent": paper.stock,
            "placement_published_percent": paper.placement,
        }
        whys: dict[str, str | None] = {}
        for mode in _MODES:
            mark = {UNPARTITIONED_MODE: paper.stock, PLACEMENT_MODE: paper.placement}.get(mode)
            percent = _percent(results, label, mode)
            row[f"{mode}_percent"] = percent
            whys[mode] = None if percent is not None else results.state(label, mode) or NOT_MEASURED
            bars[label, mode] = (
                Bar(failure=whys[mode], published=mark)
                if percent is None
                else Bar(percent, published=mark, label=f"{percent:.1f}")
            )
        row["missing"] = reasons(whys)
        rows.append(row)
    columns = ["workload", f"{UNPARTITIONED_MODE}_percent", "stock_published_percent", f"{GRAPH_MODE}_percent"]
    columns += [f"{PLACEMENT_MODE}_percent", "placement_published_percent", f"{INDIRECTION_MODE}_percent", "missing"]
    title = exhibit.title(results.published)
    chart = Chart(
        exhibit.stem,
        title,
        "% of kernels in one iteration",
        Scale.PERCENT,
        tuple(labels),
        _MODES,
        bars,
        published=f"stock and after placement, {results.published.sources[exhibit.source].setting}",
    )
    table = make_table(exhibit.stem, title, exhibit.note(results), columns, rows)
    return Made(table, chart_or_none(chart), results.provenance())


def _printed(results: Results, exhibit: Exhibit, label: str) -> str:
    return results.published.printed(exhibit.source, label)


def _percent(results: Results, label: str, mode: str) -> float | None:
    cell = results.passed(label, mode)
    return cell.metrics.coverage.percent if cell and cell.metrics and cell.metrics.coverage else None


EXHIBITS = (
    Exhibit("table2", "grace", "Table 2", "coverage by CUDA graphs, before and after placement", _DIFFERS, make),
    Exhibit(
        "pygraph-table2", "pygraph", "Table 2", "coverage by CUDA graphs, before and after placement", _DIFFERS, make
    ),
)
