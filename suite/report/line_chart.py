"""Figures of lines: a quantity against another, or the share of cases up to a value. Every line has its name on it.

Plain records as in `chart.py`, and their drawing with the same style.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from suite.report.chart import Chart
from suite.report.draw import COLOURS, INK, OTHER_COLOURS, PUBLISHED_MARK, STYLE, WARNING, draw, lay_out, wrapped
from suite.report.provenance import Provenance

_TICKS = tuple(mantissa * 10.0**power for power in range(-3, 8) for mantissa in (1, 2, 5))
_BEHIND = {"facecolor": "#808080", "alpha": 0.12, "pad": 0.8, "linewidth": 0}
"""Behind a name that stands on lines: it shows on light and dark pages."""
_LEAST_ROOM = 0.4
"""Share of the axis that a name needs left of its line; with less it stands on the right."""
_LEAST_GAP = 0.055
"""Between the names of two lines, as a share of the axis."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its name, its points in order of x, and whether it steps (a distribution) or connects them.

    `shade` picks a colour of the palette where the name is not a mode.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    steps: bool = False
    shade: int = 0


@dataclass(frozen=True, slots=True)
class LineChart:
    """A figure of lines.

    Attributes:
        name: stem of the file.
        title: one line; provenance and warning are added when it is drawn.
        x_axis, y_axis: labels with units.
        x_log, y_log: whether an axis is logarithmic: where values span more than a factor of ten, or are ratios.
        marks: vertical lines with a name: "no change" at 1.
        published: points (x, y) from a paper with what they are.
        percent: the vertical axis is a share from 0 to 100.
        note: what a reader must know, below the figure.
    """

    name: str
    title: str
    x_axis: str
    y_axis: str
    lines: tuple[Line, ...]
    x_log: bool = False
    y_log: bool = False
    marks: tuple[tuple[float, str], ...] = ()
    published: tuple[tuple[float, float, str], ...] = ()
    percent: bool = False
    note: str = ""


def draw_any(chart: Chart | LineChart, provenance: Provenance) -> Figure:
    """A figure of bars or of lines."""
    return draw_lines(chart, provenance) if isinstance(chart, LineChart) else draw(chart, provenance)


def draw_lines(chart: LineChart, provenance: Provenance) -> Figure:
    """The chart as a figure."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")
        axis = figure.subplots()
        for line in chart.lines:
            x, y = zip(*line.points, strict=True)
            axis.plot(x, y, color=_colour(line), linewidth=1.6, drawstyle="steps-post" if line.steps else "default")
            if len(x) == 1 or not line.steps:
                axis.plot(x, y, "o", color=_colour(line), markersize=3.5)
        _set_axes(axis, chart)
        _name_steps(axis, chart) if all(line.steps for line in chart.lines) else _name_lines(axis, chart)
        for place, height, name in chart.published:
            axis.plot(place, height, zorder=5, **PUBLISHED_MARK)
            axis.annotate(
                name, (place, height), xytext=(7, -2), textcoords="offset points", fontsize=7.5, va="top", color=INK,
                bbox=_BEHIND, zorder=6,
            )  # fmt: skip
        for place, name in chart.marks:
            axis.axvline(place, color=INK, linewidth=0.9, linestyle=":")
            axis.annotate(
                name, (place, 1), xycoords=("data", "axes fraction"), xytext=(-3, -3), textcoords="offset points",
                rotation=90, fontsize=7, ha="right", va="top", color=INK,
            )  # fmt: skip
        lines = [line for line in (provenance.warning, chart.title, provenance.caption) if line]
        title = "\n".join(wrapped(figure, line) for line in lines)
        figure.suptitle(title, fontsize=10, color=WARNING if provenance.warning else INK)
        if chart.note:
            figure.supxlabel(wrapped(figure, chart.note), fontsize=8.5)
        lay_out(figure)
    return figure


def _colour(line: Line) -> str:
    return COLOURS.get(line.name) or OTHER_COLOURS[line.shade % len(OTHER_COLOURS)]


def _set_axes(axis: Axes, chart: LineChart) -> None:
    axis.set_xlabel(chart.x_axis)
    axis.set_ylabel(chart.y_axis)
    axis.grid(color="#808080", alpha=0.3, linewidth=0.6)
    points = [point for line in chart.lines for point in line.points]
    points += [(x, y) for x, y, _ in chart.published]
    across = [x for x, _ in points] + [x for x, _ in chart.marks]
    for log, values, name in ((chart.x_log, across, "x"), (chart.y_log, [y for _, y in points], "y")):
        ruler = axis.xaxis if name == "x" else axis.yaxis
        if log:
            axis.set(**{f"{name}scale": "log"})
            low, high = min(values) / 1.15, max(values) * 1.15
            axis.set(**{f"{name}lim": (low, high)})
            ruler.set_major_locator(FixedLocator([tick for tick in _thinned(low, high) if low <= tick <= high]))
            ruler.set_minor_locator(NullLocator())
            ruler.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if chart.percent:
        axis.set_ylim(0, 103)


def _thinned(low: float, high: float) -> Sequence[float]:
    """Ticks at 1, 2, 5 of each decade; over many decades at 1 alone."""
    return _TICKS if math.log10(high / low) <= 2.5 else _TICKS[::3]


def _name_steps(axis: Axes, chart: LineChart) -> None:
    """The names of distributions, which all end at the top: each next to its line at its own height."""
    for place, line in enumerate(chart.lines):
        height = 35 + 55 * place / max(1, len(chart.lines) - 1)
        x = next((x for x, y in line.points if y >= height), line.points[-1][0])
        low, high = axis.get_xlim()
        share = math.log(x / low) / math.log(high / low) if chart.x_log else (x - low) / (high - low)
        right = share < _LEAST_ROOM
        axis.annotate(
            line.name, (x, height), xytext=(4 if right else -4, 0), textcoords="offset points", fontsize=8,
            va="center", ha="left" if right else "right", color=_colour(line), bbox=_BEHIND, zorder=4,
        )  # fmt: skip


def _name_lines(axis: Axes, chart: LineChart) -> None:
    """Each line's name next to its last point, moved apart where they would touch."""
    low, high = axis.get_ylim()

    def share(value: float) -> float:
        if chart.y_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    ends = sorted(((share(line.points[-1][1]), line) for line in chart.lines), key=lambda end: end[0])
    places: list[float] = []
    for place, _ in ends:
        places.append(max(place, places[-1] + _LEAST_GAP) if places else place)
    for index in reversed(range(len(places))):
        ceiling = 1.0 if index == len(places) - 1 else places[index + 1] - _LEAST_GAP
        places[index] = min(places[index], ceiling)
    for place, (_, line) in zip(places, ends, strict=True):
        axis.annotate(
            line.name, (1, place), xycoords="axes fraction", xytext=(4, 0), textcoords="offset points", fontsize=8,
            ha="left", va="center", color=_colour(line), annotation_clip=False,
        )  # fmt: skip
