"""GraCE Fig. 10, PyGraph Fig. 7: stock CUDA graphs and the whole system over PyTorch 2 without CUDA graphs."""

from __future__ import annotations

from suite.modes import GRAPH_MODE, REFERENCE_MODE, UNPARTITIONED_MODE
from suite.report.chart import Bar, Chart, Scale
from suite.report.paper.exhibit import Exhibit, Made, Results, chart_or_none, common_means, labels_of, reasons
from suite.report.run_charts import GEOMEAN
from suite.report.table import make_table

_DIFFERS = (
    f"The paper's CUDA graphs take a whole FX graph or nothing: {UNPARTITIONED_MODE}; {GRAPH_MODE} is today's stock. "
    "Inputs rotate over several addresses here, in the papers they stayed where they were. Bars of the papers' figures "
    "carry no numbers: a published value is here only where the text gives it."
)


def make(exhibit: Exhibit, results: Results) -> Made:
    """Bars over compile; the geometric mean is over the workloads that all modes have."""
    whole = results.whole_mode
    modes = (UNPARTITIONED_MODE, GRAPH_MODE, whole)
    labels = labels_of(results, exhibit.source)
    bars: dict[tuple[str, str], Bar] = {}
    rows = []
    for label in labels:
        row: dict[str, object] = {"workload": label}
        for mode in modes:
            paper = results.published_ratio(exhibit.source, label, mode, REFERENCE_MODE)
            bars[label, mode] = results.bar(label, mode, paper=paper if mode != GRAPH_MODE else None)
            if ratio := results.ratio(label, mode):
                row |= {f"{mode}_speedup": ratio.value, f"{mode}_low": ratio.low, f"{mode}_high": ratio.high}
            if mode != GRAPH_MODE:
                row[f"{_short(mode, whole)}_published_speedup"] = paper
        if ratio := results.ratio(label, whole, UNPARTITIONED_MODE):
            row["over_graphs_speedup"] = ratio.value
        row["over_graphs_published_speedup"] = results.published_ratio(exhibit.source, label, whole, UNPARTITIONED_MODE)
        row["missing"] = reasons({mode: results.why_no_ratio(label, mode) for mode in modes})
        rows.append(row)
    means, count = common_means(results, labels, [(mode, REFERENCE_MODE) for mode in modes])
    summary: dict[str, object] = {"workload": f"geomean of {count}"}
    for (mode, _), mean in means.items():
        bars[GEOMEAN, mode] = Bar(mean.value, (mean.low, mean.high), label=f"{mean.value:.2f}")
        summary |= {f"{mode}_speedup": mean.value, f"{mode}_low": mean.low, f"{mode}_high": mean.high}
    over, over_count = common_means(results, labels, [(whole, UNPARTITIONED_MODE)])
    headline = results.published.headline[exhibit.source]
    overs = {
        "workload": f"geomean of {over_count} over {UNPARTITIONED_MODE}",
        "over_graphs_speedup": over[whole, UNPARTITIONED_MODE].value if over else None,
        "over_graphs_published_speedup": headline.get("geomean_vs_graph"),
    }
    columns = ["workload"]
    for mode in modes:
        columns += [f"{mode}_speedup", f"{mode}_low", f"{mode}_high"]
        columns += [f"{_short(mode, whole)}_published_speedup"] if mode != GRAPH_MODE else []
    columns += ["over_graphs_speedup", "over_graphs_published_speedup", "missing"]
    note = exhibit.note(results)
    table = make_table(exhibit.stem, exhibit.title(results.published), note, columns, rows, [summary, overs])
    groups = (*labels, GEOMEAN) if count else labels
    chart = Chart(
        exhibit.stem,
        exhibit.title(results.published),
        f"times faster than {REFERENCE_MODE}",
        Scale.RATIO,
        groups,
        modes,
        bars,
        summary_groups=1 if count else 0,
        published=results.published.sources[exhibit.source].setting,
        note=f"Whiskers: 95 % intervals. Geomean: the {count} workloads that all modes have." if count else "",
        shown=(1 / 8, 8),
    )
    return Made(table, chart_or_none(chart), results.provenance())


def _short(mode: str, whole: str) -> str:
    return "whole" if mode == whole else "graphs"


EXHIBITS = (
    Exhibit("fig10", "grace", "Fig. 10", "stock CUDA graphs and GraCE over PyTorch 2 without graphs", _DIFFERS, make),
    Exhibit(
        "pygraph-fig7",
        "pygraph",
        "Fig. 7",
        "stock CUDA graphs and PyGraph over PyTorch 2 without graphs",
        _DIFFERS,
        make,
    ),
)
