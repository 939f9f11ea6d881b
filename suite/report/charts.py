"""Make the figures of a recorded run. Figures without a value are left out."""

from __future__ import annotations

import math
from dataclasses import replace

from suite.measure.modes import DEFAULT_MODE, GRAPH_MODE, MODES, REFERENCE_MODE
from suite.report.cell_tables import host_median_us
from suite.report.chart import Bar, Chart, Scale
from suite.report.compare import Comparison, Ratios, baselines
from suite.report.published import Published
from suite.report.runs import RowGroup, Run, cell_label, is_as_published, row_groups
from suite.results.schema import Cell, Status
from suite.results.stats import Verdict

GEOMEAN = "geomean"
BASELINES = {f"over_{mode}": mode for mode in (GRAPH_MODE, REFERENCE_MODE)}
"""Stems of the figures of speed-ups, each with its baseline."""


def of_run(ratios: Ratios, published: Published) -> tuple[Chart, ...]:
    """Make every figure this run has values for: speed-ups of each group of rows, and times of the first group."""
    run = ratios.run
    groups = row_groups(run, published)
    charts = [
        speed_ups(ratios, group, published, name, baseline) for name, baseline in BASELINES.items() for group in groups
    ]
    if groups:
        rows = replace(run, cells=tuple(cell for cell in run.cells if cell_label(cell) in groups[0].labels))
        charts.append(time_split(rows))
    return tuple(chart for chart in charts if chart.has_values)


def speed_ups(ratios: Ratios, group: RowGroup, published: Published, name: str, baseline: str) -> Chart:
    """Draw stock's graphs and Encore over a mode, for each row of a group, with the geometric means."""
    run = ratios.run
    there = {cell.mode for cell in run.cells if cell_label(cell) in group.labels and baseline in baselines(cell)}
    modes = tuple(mode for mode in _compared(run) if mode in there)
    items = ((label, mode, ratios.find(label, mode, baseline)) for label in group.labels for mode in modes)
    bars = {(label, mode): _ratio_bar(item, published) for label, mode, item in items if item is not None}
    means = ratios.means(group.labels if group.has_means else (), [(mode, baseline) for mode in modes])
    count = max((mean.count for mean in means.values()), default=0)
    for (mode, _), mean in means.items():
        bars[GEOMEAN, mode] = Bar(mean.value, _interval(mean.low, mean.high), label=f"{mean.value:.2f}")
    stock = "stock's CUDA graphs" if baseline == GRAPH_MODE else f"{baseline} (no CUDA graphs)"
    return Chart(
        f"{name}{group.suffix}",
        f"Speed-up over {stock}: {group.title}",
        f"times faster than {baseline}",
        Scale.RATIO,
        (*group.labels, *([GEOMEAN] if means else [])),
        modes,
        bars,
        summary_groups=1 if means else 0,
        published=published.sources["grace"].setting,
        note="Host time of one iteration; whiskers: 95 % intervals."
        + (f" Geometric means: of the {count} workloads that all modes have." if means else ""),
        shown=(1 / 4, 8),
    )


def _compared(run: Run) -> tuple[str, ...]:
    """Return stock's graphs, Encore and modes that capture more; without these, all modes but the reference."""
    whole = {GRAPH_MODE, DEFAULT_MODE}
    if DEFAULT_MODE not in run.modes:
        whole |= {mode for mode in run.modes if mode in MODES and MODES[mode].is_encores}
    found = tuple(mode for mode in run.modes if mode in whole or mode not in MODES or MODES[mode].captures_more)
    return found or tuple(mode for mode in run.modes if mode != REFERENCE_MODE)


def _ratio_bar(item: Comparison, published: Published) -> Bar:
    cell = item.cell
    paper = published.speedup("grace", cell.workload, cell.mode, item.baseline) if is_as_published(cell) else None
    if item.ratio is None:
        return Bar(failure=item.missing, published=paper)
    undecided = item.verdict in (Verdict.AMBG, None)
    interval = _interval(item.ratio.low, item.ratio.high)
    return Bar(item.ratio.value, interval, published=paper, undecided=undecided, label=f"{item.ratio.value:.2f}")


def time_split(run: Run) -> Chart:
    """Draw kernel time and the rest of the host time for each cell; for a failed cell, its status."""
    bars = {
        (cell_label(cell), cell.mode): _split_bar(run, cell)
        if cell.status is Status.PASS
        else Bar(failure=cell.status.value)
        for cell in run.cells
    }
    return Chart(
        "time_split",
        "Host time of one iteration: kernel time and the rest",
        f"% of {REFERENCE_MODE}'s host time",
        Scale.LINEAR,
        run.labels,
        run.modes,
        bars,
        parts=("kernel time", "the rest"),
        note="The rest: launches, copies, checks, waiting. Where kernels overlap, the sum of their times may pass "
        "the host time; the bar then has no rest. Times in microseconds are in the table.",
        shown=(0, 200),
    )


def _split_bar(run: Run, cell: Cell) -> Bar:
    reference = run.find(cell_label(cell), REFERENCE_MODE)
    whole = host_median_us(reference) if reference and reference.status is Status.PASS else None
    host, kernel = host_median_us(cell), cell.at("metrics.kernel_time_us")
    if whole is None or host is None or kernel is None:
        return Bar()
    return Bar(value=100 * kernel / whole, total=100 * host / whole)


def _interval(low: float, high: float) -> tuple[float, float] | None:
    """Return an interval to draw; none where it is open (a single block)."""
    return (low, high) if math.isfinite(high) else None
