"""How many times faster the modes of a run are: per workload with intervals and verdicts, and on average."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from suite.measure.metrics import floor
from suite.measure.modes import DEFAULT_MODE, GRAPH_MODE, REFERENCE_MODE
from suite.report import compare
from suite.report.cell_tables import Row, host_median_us
from suite.report.compare import Comparison, Kernels, TimeKind
from suite.report.groups import row_groups
from suite.report.load import Run, cell_label, is_as_published
from suite.report.published import Published
from suite.report.table import Detailed, Table, make_table
from suite.results.schema import Status
from suite.results.stats import GeometricMean, Verdict

KERNELS_NOTE = (
    f"{Kernels.RETUNED.value}: the modes do not run the same kernels; {Kernels.UNKNOWN.value}: each tuned its kernels "
    f"by itself, and which ones it ran was not recorded; {Kernels.UNSEEN.value}: there was no memory to look at them; "
    "such a ratio has no verdict and is in no mean. "
    f"{Kernels.OTHER.value}: the ratio follows the kernel times, or its baseline ran in another process; it is "
    "withdrawn."
)
"""What stands under tables with ratios whose kernels are not known to be the same."""


def all_tables(run: Run, comparisons: Sequence[Comparison], published: Published) -> tuple[Table, ...]:
    """Every table of speed-ups, in the order of the report."""
    return (
        headline(run, comparisons, published),
        *(overview(run, comparisons, published, baseline) for baseline in OVERVIEWS.values()),
        speedups(comparisons, published),
    )


OVERVIEWS = {"overview": REFERENCE_MODE, "over_graphs": GRAPH_MODE}
"""The tables that set all modes next to each other, with what their speed-ups are over."""


def overview(
    run: Run, comparisons: Sequence[Comparison], published: Published, baseline: str = REFERENCE_MODE
) -> Table:
    """One row per workload: a mode's time, and each other mode's speed-up over it with interval and verdict."""
    of_baseline = [item for item in comparisons if item.baseline == baseline]
    over = {item.cell.mode for item in of_baseline}
    modes = [mode for mode in run.modes if mode in over or (mode != baseline and baseline == REFERENCE_MODE)]
    time_column = f"{baseline}_us"
    rows = []
    for label in run.labels if modes or baseline == REFERENCE_MODE else ():
        reference = run.find(label, baseline)
        row: Row = {"workload": label}
        if reference is not None:
            passed = reference.status is Status.PASS
            row[time_column] = host_median_us(reference) if passed else Detailed(reference.status.value)
        for mode in modes:
            row[mode] = ratio_text(run, of_baseline, label, mode, baseline)
        rows.append(row)
    return make_table(
        next(name for name, mode in OVERVIEWS.items() if mode == baseline),
        f"Speed-up over {baseline}",
        f"Host time of {baseline} (median) and how many times faster each mode is, with its 95 % interval and "
        f"verdict, and that by device time where it is another. A cell without a ratio has the reason. {KERNELS_NOTE} "
        f"{_MEANS_NOTE}",
        ["workload", time_column, *modes],
        rows,
        _group_means(run, comparisons, published, modes, baseline),
    )


_MEANS_NOTE = "Geometric means go over the rows of one group that all of these modes have, and say how many these are."


def _group_means(
    run: Run, comparisons: Sequence[Comparison], published: Published, modes: Sequence[str], baseline: str
) -> list[Row]:
    """A row of geometric means for each group of rows that has any."""
    rows: list[Row] = []
    for group in row_groups(run, published):
        if group.has_means and (means := compare.common_means(comparisons, modes, baseline, group.labels)):
            texts = {mode: _mean_text(mean) for mode, mean in means.items()}
            rows.append({"workload": f"geomean: {group.title}", **texts})
    return rows


def headline(run: Run, comparisons: Sequence[Comparison], published: Published) -> Table:
    """A row for each of GraCE's workloads (else, of all) that ran in the default mode: how much faster than stock, and
    how far from the floor. The last row has the geometric means."""
    rows: list[Row] = []
    groups = row_groups(run, published)
    for label in groups[0].labels if groups else ():
        reference, cell = run.find(label, REFERENCE_MODE), run.find(label, DEFAULT_MODE)
        if reference is None or cell is None or not (reference.status is cell.status is Status.PASS):
            continue
        row: Row = {"workload": label, f"{REFERENCE_MODE}_us": host_median_us(reference)}
        for baseline in _STOCK:
            row[f"over_{baseline}"] = ratio_text(run, comparisons, label, DEFAULT_MODE, baseline)
        for mode in (GRAPH_MODE, DEFAULT_MODE):
            row[f"{mode}_over_floor"] = _over_floor(run, label, mode)
        rows.append(row)
    labels = [str(row["workload"]) for row in rows]
    means = {
        f"over_{baseline}": _mean_text(mean)
        for baseline in _STOCK
        if (mean := compare.mean_over(comparisons, DEFAULT_MODE, baseline, labels)) is not None
    }
    verdicts = {f"over_{baseline}": _verdicts_text(comparisons, baseline, labels) for baseline in _STOCK}
    return make_table(
        "headline",
        "The papers' workloads under Encore",
        f"over: how many times faster {DEFAULT_MODE} is than {REFERENCE_MODE} (no graphs) and {GRAPH_MODE} (stock's), "
        "host time, with the 95 % interval and verdict. Geometric means go over the rows with the same kernels and a "
        f"settled {DEFAULT_MODE}; {compare.UNSETTLED}: it was not, so that the row has no verdict. over floor: how "
        "many times as long as its graphs alone an iteration takes.",
        [
            "workload",
            f"{REFERENCE_MODE}_us",
            *(f"over_{baseline}" for baseline in _STOCK),
            *(f"{mode}_over_floor" for mode in (GRAPH_MODE, DEFAULT_MODE)),
        ],
        rows,
        [{"workload": "geometric mean", **means}, {"workload": "verdicts", **verdicts}] if means else [],
    )


_STOCK = (REFERENCE_MODE, GRAPH_MODE)


def _verdicts_text(comparisons: Sequence[Comparison], baseline: str, labels: Sequence[str]) -> Detailed:
    """How many rows have each verdict, and how many none."""
    counts = Counter(
        item.verdict.value if item.verdict else "none"
        for item in comparisons
        if (item.cell.mode, item.baseline, item.metric) == (DEFAULT_MODE, baseline, TimeKind.LATENCY)
        if cell_label(item.cell) in labels
    )
    return Detailed(", ".join(f"{counts[verdict]} {verdict}" for verdict in (*Verdict, "none") if counts[verdict]))


def _mean_text(mean: GeometricMean) -> Detailed:
    values = {"speedup": mean.value, "low": mean.low, "high": mean.high}
    return Detailed(f"{mean.value:.2f} [{mean.low:.2f}, {mean.high:.2f}] of {mean.count}", values)


def _over_floor(run: Run, label: str, mode: str) -> float | None:
    cell = run.find(label, mode)
    return None if cell is None else floor.METRIC.of_row(cell).get("over_floor_ratio")


def speedups(comparisons: Sequence[Comparison], published: Published) -> Table:
    """Each mode over each of its baselines, in all metrics."""
    columns = ["workload", "mode", "baseline", "metric", "speedup", "low", "high", "verdict"]
    columns += ["kernels", "processes", "blocks", "alternating", "missing", "grace_speedup"]
    return make_table(
        "speedups",
        "Every mode over its baselines",
        "latency: host time to completion; device: CUDA events around it; throughput: iterations issued back to back. "
        "low and high bound the 95 % interval; blocks: the fewest of a process. Where modes were not measured in turn, "
        "drift is in the ratio. " + published.caption("grace"),
        columns,
        (_speedup_row(item, published) for item in comparisons),
    )


def ratio_text(run: Run, comparisons: Sequence[Comparison], label: str, mode: str, baseline: str) -> Detailed:
    """A mode's speed-up over a baseline by latency, with interval and verdict, or why there is none."""
    cell = run.find(label, mode)
    item = None if cell is None else compare.find(comparisons, cell, baseline, TimeKind.LATENCY)
    if item is None:
        return Detailed("not run", {"missing": "not run"})
    if item.ratio is None:
        return Detailed(item.missing or "no samples", {"missing": item.missing or "no samples"})
    if item.kernels is Kernels.OTHER:
        return Detailed(item.kernels.value, {"missing": item.kernels.value})
    said = item.mark
    device = compare.find(comparisons, item.cell, baseline, TimeKind.DEVICE)
    if device is not None and device.verdict is not None and device.verdict is not item.verdict:
        said += f", device {device.verdict}"
    aside = "" if item.alternating else ", not alternating"
    values: Row = {"speedup": item.ratio.value, "low": item.ratio.low, "high": item.ratio.high}
    values |= {"verdict": item.verdict, "kernels": item.kernels, "settled": item.settled, "missing": None}
    return Detailed(
        f"{item.ratio.value:.2f} [{item.ratio.low:.2f}, {item.ratio.high:.2f}] {said}{aside}",
        values | {"alternating": item.alternating},
    )


def _speedup_row(item: Comparison, published: Published) -> Row:
    row: Row = {
        "workload": cell_label(item.cell),
        "mode": item.cell.mode,
        "baseline": item.baseline,
        "metric": item.metric.value,
        "missing": item.missing,
    }
    if is_as_published(item.cell) and item.metric is TimeKind.LATENCY:
        row["grace_speedup"] = published.speedup("grace", item.cell.workload, item.cell.mode, item.baseline)
    if item.ratio is not None:
        row |= {
            "speedup": item.ratio.value,
            "low": item.ratio.low,
            "high": item.ratio.high,
            "verdict": item.verdict.value if item.verdict else None,
            "kernels": item.kernels.value if item.kernels else None,
            "processes": item.ratio.processes,
            "blocks": item.ratio.blocks,
            "alternating": item.alternating,
        }
    return row
