"""Draw the indirection microbenchmark: time per replay against each quantity that was varied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from suite.micro.records import ODD_BYTES, VARIANTS, MicroRun, Sweep, Variant
from suite.report.chart import STYLE
from suite.report.provenance import of_environment
from suite.report.units import format_bytes

COLOURS: Mapping[Variant, str] = {"copy": "#E69F00", "host": "#CC79A7", "prelude": "#0072B2", "ptx": "#009E73"}

PANELS: tuple[tuple[str, Sweep], ...] = (
    ("Inputs", "inputs"),
    ("Bytes of the input", "bytes"),
    ("Nodes that read the input", "nodes"),
)

SINGLE_POINTS: Mapping[Sweep, Sweep] = {"bytes": "odd bytes"}
"""Points that stand in a panel next to its lines: so close to their points that a line through them would jump."""

MARKER_SIZE = 3.5

Line = list[tuple[int, float]]


def lines(run: MicroRun, sweep: Sweep) -> dict[tuple[Variant, bool], Line]:
    """Return median microseconds by the quantity varied, for each variant, with moved inputs or without."""
    found: dict[tuple[Variant, bool], Line] = {}
    for measured in run.points:
        if measured.sweep == sweep:
            for series in measured.series:
                if series.host_us:
                    line = found.setdefault((series.variant, series.moved), [])
                    line.append((measured.point.x, median(series.host_us)))
    return {key: sorted(line) for key, line in found.items()}


def draw(run: MicroRun) -> Figure:
    """Draw three panels, logarithmic both ways; unmoved inputs dashed."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        axes = figure.subplots(1, len(PANELS), sharey=True)
        for axis, (title, sweep) in zip(axes, PANELS, strict=True):
            _draw_panel(axis, lines(run, sweep), in_bytes=sweep == "bytes")
            if sweep in SINGLE_POINTS:
                _draw_points(axis, lines(run, SINGLE_POINTS[sweep]))
            axis.set_xlabel(title)
        axes[0].set_ylabel("Time per replay, \N{MICRO SIGN}s (median)")
        figure.legend(handles=list(_handles()), loc="outside upper center", ncols=len(VARIANTS) + 3, frameon=False)
        figure.supxlabel(of_environment(run.environment).caption, fontsize=7)
    return figure


def _draw_panel(axis: Axes, panel: Mapping[tuple[Variant, bool], Line], *, in_bytes: bool) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    for (variant, moved), line in panel.items():
        axis.plot(*zip(*line, strict=True), color=COLOURS[variant], linestyle="-" if moved else "--", linewidth=1.4)
    if in_bytes:
        axis.xaxis.set_major_formatter(lambda value, _: format_bytes(value).replace(".0 ", " "))
        axis.tick_params(axis="x", rotation=30)
    else:
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.grid(color="#808080", alpha=0.3, linewidth=0.6)


def _draw_points(axis: Axes, panel: Mapping[tuple[Variant, bool], Line]) -> None:
    for (variant, moved), line in panel.items():
        face = COLOURS[variant] if moved else "white"
        x, y = zip(*line, strict=True)
        axis.plot(x, y, "o", color=COLOURS[variant], markerfacecolor=face, markersize=MARKER_SIZE)


def _handles() -> Iterable[Line2D]:
    for variant in VARIANTS:
        yield Line2D([], [], color=COLOURS[variant], label=variant)
    yield Line2D([], [], color="#404040", linestyle="-", label="inputs moved")
    yield Line2D([], [], color="#404040", linestyle="--", label="inputs unmoved")
    yield Line2D(
        [], [], color="#404040", linestyle="", marker="o", markersize=MARKER_SIZE, label=f"{ODD_BYTES} bytes more"
    )
