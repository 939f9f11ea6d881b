"""GraCE Fig. 11, PyGraph Fig. 8: what placement, indirection and selection add, one after another."""

from __future__ import annotations

from suite.modes import DEFAULT_MODE, INDIRECTION_MODE, LEAN_MODE, PLACEMENT_MODE, REFERENCE_MODE, UNPARTITIONED_MODE
from suite.report.chart import Bar, Chart, Scale
from suite.report.paper.exhibit import (
    Exhibit,
    Made,
    Results,
    chart_or_none,
    common_means,
    labels_of,
    reasons,
)
from suite.report.run_charts import GEOMEAN
from suite.report.table import make_table

_MODES = (UNPARTITIONED_MODE, PLACEMENT_MODE, INDIRECTION_MODE, LEAN_MODE, DEFAULT_MODE)
_STEPS = (
    ("placement", PLACEMENT_MODE, UNPARTITIONED_MODE),
    ("indirection", INDIRECTION_MODE, PLACEMENT_MODE),
    ("lean", LEAN_MODE, INDIRECTION_MODE),
    ("selection", DEFAULT_MODE, LEAN_MODE),
)
"""(name, mode, what it is added to)."""
_DIFFERS = (
    "Each step is its own mode: placement adds to stock's whole-graph capture, indirection to placement, "
    "lean replay to indirection, encore (which chooses) to that. Published values are those that the text gives, of a "
    "step over the one before."
)


def make(exhibit: Exhibit, results: Results) -> Made:
    """Bars over compile, and in the table what each step gains over the one before."""
    labels = labels_of(results, exhibit.source)
    bars: dict[tuple[str, str], Bar] = {(label, mode): results.bar(label, mode) for label in labels for mode in _MODES}
    columns = ["workload"]
    for name, _, _ in _STEPS:
        columns += [f"{name}_speedup", f"{name}_low", f"{name}_high", f"{name}_published_speedup"]
    rows = []
    for label in labels:
        row: dict[str, object] = {"workload": label}
        for name, mode, before in _STEPS:
            if ratio := results.ratio(label, mode, before):
                row |= {f"{name}_speedup": ratio.value, f"{name}_low": ratio.low, f"{name}_high": ratio.high}
            row[f"{name}_published_speedup"] = _published(results, exhibit.source, label, name)
        row["missing"] = reasons({name: results.why_no_ratio(label, mode, before) for name, mode, before in _STEPS})
        rows.append(row)
    means, count = common_means(results, labels, [(mode, REFERENCE_MODE) for mode in _MODES])
    for (mode, _), mean in means.items():
        bars[GEOMEAN, mode] = Bar(mean.value, (mean.low, mean.high), label=f"{mean.value:.2f}")
    summary = []
    for name, mode, before in _STEPS:
        step, over = common_means(results, labels, [(mode, before)])
        if step:
            mean = step[mode, before]
            values = {f"{name}_speedup": mean.value, f"{name}_low": mean.low, f"{name}_high": mean.high}
            summary.append({"workload": f"geomean of {over}", **values})
    title, note = exhibit.title(results.published), exhibit.note(results)
    table = make_table(exhibit.stem, title, note, [*columns, "missing"], rows, summary)
    measured = tuple(mode for mode in _MODES if results.run is not None and mode in results.run.modes)
    lacking = [mode for mode in _MODES if mode not in measured]
    chart = Chart(
        exhibit.stem,
        title,
        f"times faster than {REFERENCE_MODE}",
        Scale.RATIO,
        (*labels, GEOMEAN) if count else labels,
        measured or _MODES,
        bars,
        summary_groups=1 if count else 0,
        note=(f"Whiskers: 95 % intervals. Geomean: the {count} workloads that all modes have. " if count else "")
        + (f"Not measured: {', '.join(lacking)}." if lacking else ""),
        shown=(1 / 8, 8),
    )
    return Made(table, chart_or_none(chart), results.provenance())


def _published(results: Results, source: str, label: str, step: str) -> float | None:
    keys = {
        "placement": "placement_over_graph",
        "indirection": "indirection_over_placement",
        "selection": "encore_over_indirection",
    }
    printed = results.published.printed(source, label)
    return results.published.speedups.get(source, {}).get(printed, {}).get(keys.get(step, step))


EXHIBITS = (
    Exhibit("fig11", "grace", "Fig. 11", "what each optimisation adds", _DIFFERS, make),
    Exhibit("pygraph-fig8", "pygraph", "Fig. 8", "what each optimisation adds", _DIFFERS, make),
)
