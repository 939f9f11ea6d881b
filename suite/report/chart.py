"""Describe figures of bars or lines as plain records, draw them with matplotlib, and write them as PNG or SVG.

pyplot is not used: no global state, no window. The same chart gives the same bytes (no dates, fixed ids). Colours are
from the palette of M. Okabe and K. Ito, which colour-blind readers can distinguish; text in the page's SVG has the
page's colour. Every figure is `WIDTH` wide, so that its text is legible in a page at 1,000 pixels.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from optimizations.byte_units import format_bytes
from suite.measure.modes import MODES
from suite.report.provenance import Provenance
from suite.results.schema import BAD_STATUSES


class Scale(StrEnum):
    """List the layouts of a value axis.

    RATIO: logarithmic, bars grow up and down from 1. BYTES: logarithmic, ticks at binary units, zeros marked as such.
    PERCENT: 0 to 100. LINEAR: bars grow up and down from 0.
    """

    LINEAR = "linear"
    RATIO = "ratio"
    BYTES = "bytes"
    PERCENT = "percent"


@dataclass(frozen=True, slots=True)
class Bar:
    """Describe one bar.

    Attributes:
        interval: (low, high) of its whisker; open where an end is infinite, and then not drawn.
        published: a value from a paper, marked next to it.
        failure: text in its place if there is no value.
        undecided: it is drawn as an outline, because it has no verdict.
        label: text after its end.
    """

    value: float | None = None
    interval: tuple[float, float] | None = None
    published: float | None = None
    failure: str | None = None
    undecided: bool = False
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """Describe a figure of grouped bars.

    Attributes:
        name: stem of the file.
        title: one line; the setting and a warning are added when it is drawn.
        axis: label of the value axis, with unit.
        groups: labels along the axis, one per workload; the last one is separated if it is `GEOMEAN`.
        series: names of the bars within a group, in order; a series that is a mode has that mode's colour.
        bars: by (group, series); a missing key is an empty place.
        published: source of the marked published values, if there are any.
        note: remarks for the caption.
        shown: range of the axis; longer bars are cut, with their value written in them.
    """

    name: str
    title: str
    axis: str
    scale: Scale
    groups: tuple[str, ...]
    series: tuple[str, ...]
    bars: Mapping[tuple[str, str], Bar]
    published: str | None = None
    note: str = ""
    shown: tuple[float, float] = (-math.inf, math.inf)

    @property
    def has_values(self) -> bool:
        return any(bar.value is not None for bar in self.bars.values())

    @property
    def caption(self) -> tuple[str, ...]:
        """Return sentences that stand under the figure."""
        bars = self.bars.values()
        sentences = [self.note] if self.note else []
        if any(bar.value is not None and _cut(self, bar.value) != bar.value for bar in bars):
            sentences.append("Bars that would pass the axis are cut, with their value written in them.")
        if any(bar.undecided for bar in bars):
            sentences.append("A pale bar is a ratio without a verdict.")
        if self.published is not None and any(bar.published is not None for bar in bars):
            sentences.append(f"Published: {self.published}.")
        return tuple(sentences)


Points = tuple[tuple[float, float], ...]
"""Points of a line in order of x."""


@dataclass(frozen=True, slots=True)
class LineChart:
    """Describe a figure of lines over a logarithmic axis.

    Attributes:
        name, title, note: as of `Chart`.
        x_axis, y_axis: labels with units.
        lines: points by the line's name; a mode has its colour.
        shares: the lines are distributions: steps, up to a share in percent, with a mark at 1 for "no change".
            Otherwise both axes are logarithmic.
        published: points (x, y) from a paper with their description.
    """

    name: str
    title: str
    x_axis: str
    y_axis: str
    lines: Mapping[str, Points]
    shares: bool = False
    published: tuple[tuple[float, float, str], ...] = ()
    note: str = ""

    @property
    def has_values(self) -> bool:
        return bool(self.lines)

    @property
    def caption(self) -> tuple[str, ...]:
        """Return sentences that stand under the figure."""
        return (self.note,) if self.note else ()


GEOMEAN = "geomean"
"""The group of a chart that holds the means of the others."""
WIDTH = 9.0
"""Inches. At 1,000 pixels a point is 1.5 pixels, so that text of 7 points is 11 pixels high."""
LEAST_POINTS = 7.0
"""Size of the smallest text."""
INK = "#123450"
"""Colour of all text and lines; in the page's SVG it is replaced by the page's own (`currentColor`)."""
WARNING = "#D55E00"
_FAILURE = "#C4001A"
_NO_RESULT = "#808080"
"""Backgrounds of the text in place of a bar: for a failed cell, and for a cell without a result. No mode has these
colours."""
COLOURS = {mode.name: mode.colour for mode in MODES.values() if mode.colour is not None}
"""Colours of series by their names: modes, and Encore as a whole."""
OTHER_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C8C8C")
_BARS_PER_PANEL = 60
"""With more, labels of bars would touch."""
_GROUPS_PER_PANEL = 15
_CHARACTERS = 108
"""Characters of a line of the title at its size."""
_AXIS_CHARACTERS = 32
"""Characters in a line of the name of an axis: more would be longer than a panel is high."""
_GROUP_SHARE = 0.86
"""Fraction of a group's width that is covered by bars."""
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "encore",
}
_FINE_TICKS = (0.25, 0.35, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 4)
_COARSE_TICKS = (0.01, 0.03, 0.06, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128)
_PUBLISHED: dict[str, Any] = {
    "linestyle": "",
    "marker": "D",
    "markersize": 4.5,
    "markerfacecolor": "white",
    "markeredgecolor": INK,
    "markeredgewidth": 1.0,
    "clip_on": False,
}
_PAGE_FONTS = "'DejaVu Sans', Verdana, sans-serif"
"""Fonts of text in a page; the second has the same width as the first."""
_LOWEST_BYTES = 1.0
"""Beginning of the byte axis: a bar of 0 bytes has no height there and is marked "0"."""
_BASES = {Scale.RATIO: 1.0, Scale.BYTES: _LOWEST_BYTES, Scale.LINEAR: 0.0, Scale.PERCENT: 0.0}


def draw(chart: Chart | LineChart, provenance: Provenance) -> Figure:
    """Return the chart as a figure, with its title and the setting of the measurements."""
    with matplotlib.rc_context(STYLE):
        figure = _draw_lines(chart) if isinstance(chart, LineChart) else _draw_bars(chart)
        lines = [line for line in (provenance.warning, chart.title, provenance.setting) if line]
        title = "\n".join(textwrap.fill(line, _CHARACTERS) for line in lines)
        figure.suptitle(title, fontsize=10, color=WARNING if provenance.warning else INK)
        figure.draw_without_rendering()
        figure.set_layout_engine(None)  # otherwise each file format would compute the layout again
    return figure


def to_png(figure: Figure) -> bytes:
    """Return the figure as PNG, 150 dots per inch, on white."""
    return _rendered(figure, "png", dpi=150, facecolor="white", metadata={"Software": None})


def to_svg(figure: Figure, name: str) -> str:
    """Return the figure as a small `<svg>` element for a page.

    Text stays text, in the page's colour. Ids begin with `name`. Coordinates have one decimal: a tenth of a point.
    """
    data = _rendered(figure, "svg", transparent=True, metadata={"Date": None, "Creator": None}).decode()
    element = data[data.index("<svg") :].replace(INK.lower(), "currentColor")
    element = element.replace(" font-family: 'DejaVu Sans';", "").replace(
        "<svg ", f'<svg font-family="{_PAGE_FONTS}" ', 1
    )
    element = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|(?<=>)\s+(?=<)", "", element, flags=re.DOTALL)
    element = re.sub(r"<g[^>]*/>", "", element)
    element = re.sub(r"<[^>]+>", _with_short_numbers, re.sub(r"\s*\n\s*", " ", element))
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', element))
    element = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", element)
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", element)


def _with_short_numbers(tag: re.Match[str]) -> str:
    """Write the numbers of a tag with one decimal, but not the values in text between tags."""
    return re.sub(r"(\d\.\d)\d+", r"\1", tag[0])


def colour(chart: Chart, series: str) -> str:
    """Return the colour of a series: a mode's own, or the next of the palette that no mode of the chart has."""
    if series in COLOURS:
        return COLOURS[series]
    taken = {COLOURS.get(name) for name in chart.series}
    free = [each for each in OTHER_COLOURS if each not in taken]
    return free[[name for name in chart.series if name not in COLOURS].index(series) % len(free)]


def _rendered(figure: Figure, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=form, **options)
    return buffer.getvalue()


def _draw_bars(chart: Chart) -> Figure:
    """Draw groups side by side; where there are too many they are spread evenly over panels, one below another."""
    most = max(3, min(_GROUPS_PER_PANEL, _BARS_PER_PANEL // max(1, len(chart.series))))
    count = max(1, math.ceil(len(chart.groups) / most))
    size = max(1, math.ceil(len(chart.groups) / count))
    panels = [chart.groups[start : start + size] for start in range(0, max(1, len(chart.groups)), size)]
    figure = Figure(figsize=(WIDTH, 1.2 + 2.7 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, sharey=True)[:, 0]
    _set_scale(axes[0], chart)
    for axis, groups in zip(axes, panels, strict=True):
        _draw_panel(axis, chart, groups)
        axis.set_xlim(-0.6, size - 0.4)
    _draw_legend(figure, chart)
    return figure


def _draw_panel(axis: Axes, chart: Chart, groups: tuple[str, ...]) -> None:
    width = _GROUP_SHARE / max(1, len(chart.series))
    for place, group in enumerate(groups):
        common = _common_failure(chart, group)
        if common is not None:
            _write_failure(axis, Bar(failure=common), place, _BASES[chart.scale])
        for position, series in enumerate(chart.series):
            bar = chart.bars.get((group, series))
            if bar is not None:
                bar = replace(bar, failure=None) if common is not None else bar
                centre = place + (position - (len(chart.series) - 1) / 2) * width
                _draw_bar(axis, chart, bar, centre, width, colour(chart, series))
    slanted = len(chart.groups) > 6
    remarks = {group.partition(" (")[2] for group in chart.groups if group != GEOMEAN}
    remark = f" ({next(iter(remarks))}" if len(remarks) == 1 else ""  # the title has what all share
    names = [group.removesuffix(remark).replace(":", ":\n") for group in groups]  # a user's is module:callable
    axis.set_xticks(
        range(len(groups)), names, rotation=30 if slanted else 0, rotation_mode="anchor",
        ha="right" if slanted else "center", fontsize=8,
    )  # fmt: skip
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel(textwrap.fill(chart.axis, _AXIS_CHARACTERS))
    axis.grid(axis="y", color="#808080", alpha=0.3, linewidth=0.6)
    axis.set_axisbelow(True)
    if groups[-1:] == (GEOMEAN,):
        axis.axvline(len(groups) - 1.5, color=INK, linewidth=0.8, linestyle=":")
    if chart.scale in (Scale.RATIO, Scale.LINEAR):
        axis.axhline(_BASES[chart.scale], color=INK, linewidth=0.9)


def _common_failure(chart: Chart, group: str) -> str | None:
    """Return the reason why all bars of a group have no value, to write it once."""
    found = [bar for series in chart.series if (bar := chart.bars.get((group, series))) is not None]
    reasons = {bar.failure for bar in found if bar.value is None}
    return reasons.pop() if len(found) > 1 and len(reasons) == 1 and all(bar.value is None for bar in found) else None


def _draw_bar(axis: Axes, chart: Chart, bar: Bar, centre: float, width: float, fill: str) -> None:
    base = _BASES[chart.scale]
    if bar.value is not None:
        end = _cut(chart, max(bar.value, base) if _is_upward(chart) else bar.value)
        style: dict[str, Any] = {"color": fill, "linewidth": 0}
        if bar.undecided:
            style = {"facecolor": (fill, 0.3), "edgecolor": INK, "linewidth": 0.8}
        axis.bar(centre, end - base, width * 0.94, bottom=base, **style)
        if _cut(chart, bar.value) != bar.value:
            _write_at_cut(axis, chart, bar.value, centre)
            return
        ends = [end]
        if bar.interval is not None and all(map(math.isfinite, bar.interval)):
            reach = [[bar.value - bar.interval[0]], [bar.interval[1] - bar.value]]
            axis.errorbar(centre, bar.value, reach, color=INK, linewidth=0.9, capsize=1.6)
            ends += bar.interval
        if bar.value == 0 and bar.label is None:
            _write_box(axis, "0", centre, base, bar, fill, rotation=0)
        elif bar.label is not None:
            down = not _is_upward(chart) and bar.value < base
            place, away = _past_mark(axis, _cut(chart, (min if down else max)(ends)), bar, bar.label, down=down)
            _write(axis, bar.label, centre, place, -away if down else away)
    elif bar.failure is not None:
        _write_failure(axis, bar, centre, base)
    if bar.published is not None:
        height = max(bar.published, base) if _is_upward(chart) else bar.published
        axis.plot(centre, height, zorder=5, **_PUBLISHED)


def _is_upward(chart: Chart) -> bool:
    """Return whether all bars grow upwards, from the lower end of the axis."""
    return chart.scale in (Scale.BYTES, Scale.PERCENT)


def _past_mark(axis: Axes, end: float, bar: Bar, text: str, *, down: bool = False) -> tuple[float, float]:
    """Return the start of upright text at an end, and an offset in points, so that it avoids a published value."""
    mark = bar.published
    if mark is None or (axis.get_yscale() == "log" and min(end, mark) <= 0):
        return end, 3
    places = (axis.transData + axis.transAxes.inverted()).transform([(0, end), (0, mark)])[:, 1]
    if abs(places[1] - places[0]) >= 0.7 * _height(text):  # an axis is longer than its values
        return end, 3
    return (min if down else max)(end, mark), 6


def _write_failure(axis: Axes, bar: Bar, centre: float, base: float) -> None:
    """Write the reason in place of a bar: red for a failure, grey for a value that was not measured."""
    assert bar.failure is not None
    failed = bar.failure.rpartition(": ")[2] in BAD_STATUSES
    text = (f"\N{BALLOT X} {bar.failure}" if failed else bar.failure).replace(": ", ":\n")
    _write_box(axis, text, centre, base, bar, _FAILURE if failed else _NO_RESULT, rotation=90)


def _write_box(axis: Axes, text: str, centre: float, base: float, bar: Bar, fill: str, rotation: int) -> None:
    place, away = _past_mark(axis, base, bar, text)
    box = {"facecolor": fill, "alpha": 0.25, "pad": 0.6, "linewidth": 0}
    _write(axis, text, centre, place, away, rotation=rotation, bbox=box)


def _write(axis: Axes, text: str, centre: float, height: float, away: float, **style: Any) -> None:
    """Write upright text past a height: above it, or below where `away` is negative."""
    axis.annotate(
        text, (centre, height), xytext=(0, away), textcoords="offset points", fontsize=LEAST_POINTS, ha="center",
        va="bottom" if away > 0 else "top", **{"rotation": 90, "color": INK, **style},
    )  # fmt: skip


def _height(text: str) -> float:
    """Estimate the height of upright text as a fraction of a panel's height."""
    return 0.05 + 0.033 * max(map(len, text.split("\n")))


def _write_at_cut(axis: Axes, chart: Chart, value: float, centre: float) -> None:
    """Write the value of a bar that is cut, inside its end."""
    text = f"{value:.2f}\N{MULTIPLICATION SIGN}" if chart.scale is Scale.RATIO else f"{value:,.0f}"
    box = {"facecolor": "white", "alpha": 0.7, "pad": 0.4, "linewidth": 0}
    _write(axis, text, centre, _cut(chart, value), 2 if value < chart.shown[0] else -2, color="black", bbox=box)


def _cut(chart: Chart, value: float) -> float:
    """Return the value, limited to the shown range."""
    low, high = chart.shown
    return min(max(value, low), high)


def _set_scale(axis: Axes, chart: Chart) -> None:
    """Set limits and ticks of the value axis, which all panels share."""
    values = list(_drawn_values(chart))
    labels = any(bar.label for bar in chart.bars.values())
    if chart.scale is Scale.RATIO:
        axis.set_yscale("log")
        low, high = min([0.85, *values]) / 1.08, max([1.2, *values]) * 1.08
        if labels:
            low, high = low / (high / low) ** 0.14, high * (high / low) ** 0.14
        failures = [bar.failure.replace(": ", ":\n") for bar in chart.bars.values() if bar.failure]
        share = min(0.6, max(map(_height, failures), default=0.0))
        high = max(high, low ** (-share / (1 - share)))  # they are written upwards from 1
        axis.set_ylim(low, high)
        ticks = _FINE_TICKS if low > 0.2 and high < 5 else _COARSE_TICKS
        _set_ticks(
            axis.yaxis, [tick for tick in ticks if low <= tick <= high], lambda v, _: f"{v:g}\N{MULTIPLICATION SIGN}"
        )
    elif chart.scale is Scale.BYTES:
        axis.set_yscale("log", base=2)
        exponent = max(1, math.ceil(math.log2(max([2.0, *values]))))
        axis.set_ylim(_LOWEST_BYTES, 2.0 ** (exponent * 1.25 if labels else exponent + 1))
        powers = [2.0**power for power in range(0, exponent + 2, 5)]
        _set_ticks(axis.yaxis, powers, lambda value, _: format_bytes(value).replace(".0 ", " "))
    elif chart.scale is Scale.PERCENT:
        axis.set_ylim(0, 125 if labels else 105)
        axis.yaxis.set_major_locator(FixedLocator([0, 20, 40, 60, 80, 100]))
    else:
        top, bottom = max([1e-9, *values]), min([0.0, *values])
        room = (0.22 if labels else 0.06) * (top - bottom)
        axis.set_ylim(bottom - room if bottom < 0 else 0, top + room)


def _set_ticks(ruler: Axis, ticks: Sequence[float], text: Callable[[float, int], str]) -> None:
    ruler.set_major_locator(FixedLocator(list(ticks)))
    ruler.set_major_formatter(FuncFormatter(text))
    ruler.set_minor_locator(NullLocator())


def _drawn_values(chart: Chart) -> Iterator[float]:
    """Return the values that can be drawn on the axis; on a logarithmic one, those above 0."""
    signed = chart.scale is Scale.LINEAR
    for bar in chart.bars.values():
        for value in (bar.value, *(bar.interval or ())):
            if value is not None and math.isfinite(value) and (signed or value > 0):
                yield _cut(chart, value)
        if bar.published is not None and (signed or bar.published > 0):
            yield bar.published


def _draw_legend(figure: Figure, chart: Chart) -> None:
    handles: list[Any] = [Patch(color=colour(chart, series), label=series) for series in chart.series]
    if chart.published is not None and any(bar.published is not None for bar in chart.bars.values()):
        handles.append(Line2D([], [], label="published", **_PUBLISHED))
    if any(bar.undecided for bar in chart.bars.values()):
        handles.append(Patch(facecolor=(INK, 0.15), edgecolor=INK, label="no verdict"))
    _write_legend(figure, handles)


def _write_legend(figure: Figure, handles: Sequence[Any]) -> None:
    columns = max(1, _CHARACTERS // (max(len(handle.get_label()) for handle in handles) + 6))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(columns, len(handles)), frameon=False, fontsize=8.5
    )


def _draw_lines(chart: LineChart) -> Figure:
    figure = Figure(figsize=(WIDTH, 5.0), layout="constrained")
    axis = figure.subplots()
    handles = []
    for place, (name, points) in enumerate(chart.lines.items()):
        shade = COLOURS.get(name) or OTHER_COLOURS[place % len(OTHER_COLOURS)]
        style: dict[str, Any] = {"drawstyle": "steps-post"} if chart.shares else {"marker": "o", "markersize": 3.5}
        handles += axis.plot(*zip(*points, strict=True), color=shade, linewidth=1.6, label=name, **style)
    for x, y, name in chart.published:
        handles += axis.plot(x, y, zorder=5, label=name, **_PUBLISHED)
    axis.set(xlabel=chart.x_axis, ylabel=chart.y_axis, xscale="log")
    if chart.shares:
        axis.set_ylim(0, 103)
        axis.axvline(1, color=INK, linewidth=0.9, linestyle=":")
        axis.annotate(
            "no change", (1, 1), xycoords=("data", "axes fraction"), xytext=(-3, -3), textcoords="offset points",
            rotation=90, fontsize=8, ha="right", va="top", color=INK,
        )  # fmt: skip
    else:
        axis.set_yscale("log")
    for ruler in (axis.xaxis,) if chart.shares else (axis.xaxis, axis.yaxis):
        ruler.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ruler.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ruler.set_minor_locator(NullLocator())
    axis.grid(color="#808080", alpha=0.3, linewidth=0.6)
    _write_legend(figure, handles)
    return figure
