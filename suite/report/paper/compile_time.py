"""GraCE Fig. 13: time to compile and capture, over that of stock's CUDA graphs."""

from __future__ import annotations

import math

from suite.modes import DEFAULT_MODE, INDIRECTION_MODE, PLACEMENT_MODE, UNPARTITIONED_MODE
from suite.report.cell_tables import compile_conditions
from suite.report.chart import Bar, Chart, Scale
from suite.report.paper.exhibit import (
    NOT_MEASURED,
    Exhibit,
    Made,
    Results,
    chart_or_none,
    labels_of,
    reasons,
)
from suite.report.run_charts import GEOMEAN
from suite.report.selected import judged_groups
from suite.report.table import make_table

OTHER_CONDITIONS = "other conditions"
_MODES = (PLACEMENT_MODE, INDIRECTION_MODE, DEFAULT_MODE)
_DIFFERS = (
    f"Time is from the first call to the end of warm-up, recordings included; bars are over {UNPARTITIONED_MODE}, with "
    "seconds written on them. It is one measurement per cell and has no interval. There is a bar where both compiled "
    "under the same conditions (`conditions`: what was cached, and whether other modes compiled at the same time). "
    "selection: what measuring took beyond the fastest way to serve those calls; its share is of "
    f"{UNPARTITIONED_MODE}'s seconds."
)


def make(exhibit: Exhibit, results: Results) -> Made:
    """Bars of warm-up time over stock's, lower is better."""
    labels = labels_of(results, exhibit.source)
    bars: dict[tuple[str, str], Bar] = {}
    rows = []
    ratios: dict[str, list[float]] = {}
    for label in labels:
        stock = _seconds(results, label, UNPARTITIONED_MODE)
        paper = results.published.compile_s.get(exhibit.source, {}).get(label, {})
        row: dict[str, object] = {
            "workload": label,
            f"{UNPARTITIONED_MODE}_s": stock,
            "graphs_published_s": paper.get("graph"),
            "whole_published_s": paper.get("encore"),
        }
        for mode in _MODES:
            seconds = _seconds(results, label, mode)
            row[f"{mode}_s"] = seconds
            if seconds is not None and stock and not _alike(results, label, mode):
                bars[label, mode] = Bar(failure=OTHER_CONDITIONS)
            elif seconds is not None and stock:
                row[f"{mode}_ratio"] = seconds / stock
                ratios.setdefault(mode, []).append(seconds / stock)
                bars[label, mode] = Bar(seconds / stock, label=f"{seconds:.3g} s")
            else:
                why = results.state(label, mode) or results.state(label, UNPARTITIONED_MODE)
                bars[label, mode] = Bar(failure=why or NOT_MEASURED)
        whole = results.passed(label, DEFAULT_MODE)
        groups = judged_groups(whole) if whole is not None else []
        if groups:
            excess_s = math.fsum(group.excess_s for group in groups)
            row |= {"selection_s": excess_s, "selection_share": excess_s / stock if stock else None}
        row["conditions"] = _conditions(results, label, UNPARTITIONED_MODE)
        row["missing"] = reasons({mode: results.state(label, mode) for mode in (UNPARTITIONED_MODE, *_MODES)})
        rows.append(row)
    summary: dict[str, object] = {"workload": GEOMEAN}
    for mode, found in ratios.items():
        mean = math.exp(math.fsum(map(math.log, found)) / len(found))
        summary[f"{mode}_ratio"] = mean
        bars[GEOMEAN, mode] = Bar(mean, label=f"{mean:.2f} of {len(found)}")
    headline = results.published.headline[exhibit.source]
    published = {
        "workload": "published: mean, largest",
        f"{DEFAULT_MODE}_ratio": f"{headline['compile_time_ratio']}, {headline['compile_time_ratio_max']}",
    }
    columns = ["workload", f"{UNPARTITIONED_MODE}_s", *(f"{mode}_s" for mode in _MODES)]
    columns += [
        *(f"{mode}_ratio" for mode in _MODES),
        "selection_s",
        "selection_share",
        "graphs_published_s",
        "whole_published_s",
    ]
    columns += ["conditions", "missing"]
    title = exhibit.title(results.published)
    table = make_table(exhibit.stem, title, exhibit.note(results), columns, rows, [summary, published])
    measured = tuple(mode for mode in _MODES if results.run is not None and mode in results.run.modes)
    chart = Chart(
        exhibit.stem,
        title,
        f"times {UNPARTITIONED_MODE}'s seconds (lower is better)",
        Scale.RATIO,
        (*labels, GEOMEAN) if ratios else labels,
        measured or _MODES,
        bars,
        summary_groups=1 if ratios else 0,
        note=f"Published, for GraCE as a whole: {headline['compile_time_ratio']} in the mean, up to "
        f"{headline['compile_time_ratio_max']}.",
        shown=(1 / 8, 16),
    )
    return Made(table, chart_or_none(chart), results.provenance())


def _alike(results: Results, label: str, mode: str) -> bool:
    return _conditions(results, label, mode) == _conditions(results, label, UNPARTITIONED_MODE)


def _conditions(results: Results, label: str, mode: str) -> str | None:
    cell = results.passed(label, mode)
    return compile_conditions(cell.compile) if cell is not None and cell.compile is not None else None


def _seconds(results: Results, label: str, mode: str) -> float | None:
    cell = results.passed(label, mode)
    return cell.compile.warm_up_s if cell is not None and cell.compile is not None else None


EXHIBITS = (Exhibit("fig13", "grace", "Fig. 13", "compile time over that of stock CUDA graphs", _DIFFERS, make),)
