"""Make the figures of a recorded run. Figures without a value are left out."""

from __future__ import annotations

from dataclasses import replace

from suite.measure.modes import DEFAULT_MODE, GRAPH_MODE, MODES, REFERENCE_MODE
from suite.report.chart import Bar, Chart, Scale
from suite.report.compare import baselines
from suite.report.grid import Grid, Series, count_note
from suite.report.paper.exhibit import Results, ratio_series
from suite.report.runs import RowGroup, row_groups

BASELINES = {f"over_{mode}": mode for mode in (GRAPH_MODE, REFERENCE_MODE)}
"""Stems of the figures of speed-ups, each with its baseline."""


def of_run(results: Results) -> tuple[Chart, ...]:
    """Make the figures of speed-ups that the run has values for, one for each group of rows."""
    groups = row_groups(results.ratios.labels, results.published)
    charts = (speed_ups(results, group, name, baseline) for name, baseline in BASELINES.items() for group in groups)
    return tuple(chart for chart in charts if chart.has_values)


def speed_ups(results: Results, group: RowGroup, name: str, baseline: str) -> Chart:
    """Draw stock's graphs and Encore over a mode, for each row of a group, with the geometric means."""
    ratios = results.ratios
    rows = [cell for label in group.labels for cell in ratios.row(label)]
    modes = [mode for mode in _compared(ratios.modes) if any(c.mode == mode and baseline in baselines(c) for c in rows)]

    def series(mode: str) -> Series:
        made = ratio_series(results, "grace", mode, baseline)
        return replace(made, measure=lambda label: made.measure(label) if ratios.cell(label, mode) else Bar())

    means = results.means(group.labels if group.has_means else (), modes, baseline)
    stock = "stock's CUDA graphs" if baseline == GRAPH_MODE else f"{baseline} (no CUDA graphs)"
    grid = Grid(
        "speedup",
        f"times faster than {baseline}",
        Scale.RATIO,
        group.labels,
        tuple(map(series, modes)),
        note=f"Host time of one iteration. {count_note(means)}".strip(),
        shown=(1 / 4, 8),
        means=means,
    )
    title = f"Speed-up over {stock}: {group.title}"
    return grid.chart(f"{name}{group.suffix}", title, results.published.sources["grace"].setting)


def _compared(modes: tuple[str, ...]) -> tuple[str, ...]:
    """Return stock's graphs, Encore and modes that capture more; without these, all modes but the reference."""
    whole = {GRAPH_MODE, DEFAULT_MODE}
    if DEFAULT_MODE not in modes:
        whole |= {mode for mode in modes if mode in MODES and MODES[mode].is_encores}
    found = tuple(mode for mode in modes if mode in whole or mode not in MODES or MODES[mode].captures_more)
    return found or tuple(mode for mode in modes if mode != REFERENCE_MODE)
