"""GraCE's memory figures: peak memory while compiling and while replaying, over stock CUDA graphs."""

from __future__ import annotations

import math

from suite.modes import GRAPH_MODE
from suite.report.chart import Bar, Chart, Scale
from suite.report.paper.exhibit import NOT_MEASURED, Exhibit, Made, Results, chart_or_none, labels_of, reasons
from suite.report.run_charts import GEOMEAN
from suite.report.table import make_table

_PHASES = {"compiling": "compile_peak_reserved_bytes", "replaying": "replay_peak_reserved_bytes"}
_DIFFERS = (
    f"Peak bytes that PyTorch's allocator has reserved, over those of {GRAPH_MODE}. The papers give the mean while "
    "compiling and the best case while replaying."
)


def make(exhibit: Exhibit, results: Results) -> Made:
    """Two bars per workload, lower is better."""
    labels = labels_of(results, exhibit.source)
    whole = results.whole_mode
    bars: dict[tuple[str, str], Bar] = {}
    found: dict[str, list[float]] = {phase: [] for phase in _PHASES}
    rows = []
    for label in labels:
        row: dict[str, object] = {"workload": label}
        whys: dict[str, str | None] = {}
        for phase, name in _PHASES.items():
            ours, stock = _bytes(results, label, whole, name), _bytes(results, label, GRAPH_MODE, name)
            row |= {f"{phase}_{GRAPH_MODE}_bytes": stock, f"{phase}_{whole}_bytes": ours}
            if ours is None or not stock:
                why = results.state(label, whole) or results.state(label, GRAPH_MODE) or NOT_MEASURED
                whys[phase], bars[label, phase] = why, Bar(failure=why)
                continue
            row[f"{phase}_ratio"] = ours / stock
            found[phase].append(ours / stock)
            bars[label, phase] = Bar(ours / stock, label=f"{ours / stock:.2f}")
            whys[phase] = None
        row["missing"] = reasons(whys)
        rows.append(row)
    summary: dict[str, object] = {"workload": GEOMEAN}
    for phase, ratios in found.items():
        if ratios:
            mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
            summary[f"{phase}_ratio"] = mean
            bars[GEOMEAN, phase] = Bar(mean, label=f"{mean:.2f} of {len(ratios)}")
    headline = results.published.headline[exhibit.source]
    published = {
        "workload": "published: mean, best",
        "compiling_ratio": headline.get("compile_peak_memory"),
        "replaying_ratio": headline.get("replay_peak_memory_best"),
    }
    columns = ["workload"]
    for phase in _PHASES:
        columns += [f"{phase}_{GRAPH_MODE}_bytes", f"{phase}_{whole}_bytes", f"{phase}_ratio"]
    title, any_found = exhibit.title(results.published), any(found.values())
    note = exhibit.note(results)
    if "compile_peak_memory" not in headline:
        note += " results/published.json holds no value of this table of this paper."
    table = make_table(exhibit.stem, title, note, [*columns, "missing"], rows, [summary, published])
    chart = Chart(
        exhibit.stem,
        title,
        f"times {GRAPH_MODE}'s bytes (lower is better)",
        Scale.RATIO,
        (*labels, GEOMEAN) if any_found else labels,
        tuple(_PHASES),
        bars,
        summary_groups=1 if any_found else 0,
        note=f"Mode {whole}."
        + (
            f" Published: {headline['compile_peak_memory']} in the mean while compiling, "
            f"{headline['replay_peak_memory_best']} in the best case while replaying."
            if "compile_peak_memory" in headline
            else ""
        ),
        shown=(1 / 8, 8),
    )
    return Made(table, chart_or_none(chart), results.provenance())


def _bytes(results: Results, label: str, mode: str, name: str) -> int | None:
    cell = results.passed(label, mode)
    memory = cell.metrics.memory if cell and cell.metrics else None
    return None if memory is None else getattr(memory, name)


EXHIBITS = (Exhibit("memory", "grace", "section 5.3", "peak memory over that of stock CUDA graphs", _DIFFERS, make),)
