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
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from optimizations.byte_units import format_bytes
from suite.measure.modes import MODES
from suite.report.provenance import Provenance
from suite.results.schema import Status


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
        interval: (low, high) of its whisker.
        total: end of a second, lighter part that is stacked on it.
        published: a value from a paper, marked next to it.
        failure: text in its place if there is no value.
        undecided: it is drawn as an outline, because it has no verdict.
        label: text after its end.
    """

    value: float | None = None
    interval: tuple[float, float] | None = None
    total: float | None = None
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
        groups: labels along the axis, one per workload; the last `summary_groups` are separated (means).
        series: names of the bars within a group, in order; a series that is a mode has that mode's colour.
        bars: by (group, series); a missing key is an empty place.
        parts: names of the solid and of the lighter part, where bars are stacked.
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
    summary_groups: int = 0
    parts: tuple[str, str] | None = None
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
        ends = [end for bar in bars for end in (bar.value, bar.total) if end is not None]
        low, high = self.shown
        sentences = [self.note] if self.note else []
        if any(not low <= end <= high for end in ends):
            sentences.append("Bars that would pass the axis are cut, with their value written in them.")
        if any(bar.undecided for bar in bars):
            sentences.append("A pale bar is a ratio without a verdict.")
        if self.published is not None and any(bar.published is not None for bar in bars):
            sentences.append(f"Published: {self.published}.")
        return tuple(sentences)


@dataclass(frozen=True, slots=True)
class Line:
    """Describe one line: its name, its points in order of x, and whether it is a step function (a distribution).

    `shade` selects a colour of the palette if the name is not a mode.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    steps: bool = False
    shade: int = 0


@dataclass(frozen=True, slots=True)
class LineChart:
    """Describe a figure of lines: one quantity against another, or the share of cases up to a value.

    Attributes:
        name, title, note: as of `Chart`.
        x_axis, y_axis: labels with units.
        x_log, y_log: whether an axis is logarithmic.
        marks: vertical lines with a name: "no change" at 1.
        published: points (x, y) from a paper with their description.
        percent: the vertical axis is a share from 0 to 100.
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

    @property
    def has_values(self) -> bool:
        return bool(self.lines)

    @property
    def caption(self) -> tuple[str, ...]:
        """Return sentences that stand under the figure."""
        return (self.note,) if self.note else ()


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
_BAD_STATUSES = frozenset(status.value for status in Status if status is not Status.PASS)
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
_LINE_TICKS = tuple(mantissa * 10.0**power for power in range(-3, 8) for mantissa in (1, 2, 5))
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
            _write_failure(axis, common, place, _BASES[chart.scale])
        for position, series in enumerate(chart.series):
            bar = chart.bars.get((group, series))
            if bar is not None:
                bar = replace(bar, failure=None) if common is not None else bar
                centre = place + (position - (len(chart.series) - 1) / 2) * width
                _draw_bar(axis, chart, bar, centre, width, colour(chart, series))
    slanted = len(chart.groups) > 6
    axis.set_xticks(
        range(len(groups)),
        _tick_texts(chart, groups),
        rotation=30 if slanted else 0,
        rotation_mode="anchor",
        fontsize=8,
    )
    for label in axis.get_xticklabels():
        label.set_horizontalalignment("right" if slanted else "center")
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel(textwrap.fill(chart.axis, _AXIS_CHARACTERS))
    axis.grid(axis="y", color="#808080", alpha=0.3, linewidth=0.6)
    axis.set_axisbelow(True)
    if chart.summary_groups and groups[-1] == chart.groups[-1]:
        axis.axvline(len(groups) - chart.summary_groups - 0.5, color=INK, linewidth=0.8, linestyle=":")
    if chart.scale in (Scale.RATIO, Scale.LINEAR):
        axis.axhline(_BASES[chart.scale], color=INK, linewidth=0.9)


def _tick_texts(chart: Chart, groups: tuple[str, ...]) -> list[str]:
    """Return the names of groups, without a remark in brackets that all of them share, because the title has it."""
    own = chart.groups[: len(chart.groups) - chart.summary_groups]
    remarks = {group.partition(" (")[2] for group in own}
    remark = f" ({remarks.pop()}" if len(remarks) == 1 else ""
    own_names = [group.removesuffix(remark) if remark != " (" else group for group in groups]
    return [name.replace(":", ":\n") for name in own_names]  # a program of the user's: module:callable


def _common_failure(chart: Chart, group: str) -> str | None:
    """Return the reason why all bars of a group have no value, to write it once."""
    found = [bar for series in chart.series if (bar := chart.bars.get((group, series))) is not None]
    reasons = {bar.failure for bar in found if bar.value is None}
    return reasons.pop() if len(found) > 1 and len(reasons) == 1 and all(bar.value is None for bar in found) else None


def _draw_bar(axis: Axes, chart: Chart, bar: Bar, centre: float, width: float, fill: str) -> None:
    base = _BASES[chart.scale]
    if bar.value is not None:
        top = max(bar.value, base) if chart.scale is Scale.BYTES else _cut(chart, bar.value)
        style: dict[str, Any] = {"color": fill, "linewidth": 0}
        if bar.undecided:
            style = {"facecolor": (fill, 0.3), "edgecolor": INK, "linewidth": 0.8}
        axis.bar(centre, top - base, width * 0.94, bottom=base, **style)
        end = bar.value
        if bar.total is not None and bar.total > bar.value:
            end = bar.total
            axis.bar(centre, _cut(chart, end) - top, width * 0.94, bottom=top, color=fill, alpha=0.35, linewidth=0)
        if _cut(chart, end) != end:
            _write_at_cut(axis, chart, end, centre)
        if bar.value == 0 and bar.total is None and bar.label is None:
            _write_at_base(axis, "0", centre, *_past_mark(axis, bar, base, "0"), fill, rotation=0)
        if bar.interval is not None and _cut(chart, bar.value) == bar.value:
            below, above = bar.value - bar.interval[0], bar.interval[1] - bar.value
            axis.errorbar(centre, bar.value, [[below], [above]], color=INK, linewidth=0.9, capsize=1.6)
        if bar.label is not None and _cut(chart, bar.value) == bar.value:
            _write_above(axis, chart, bar, centre)
    elif bar.failure is not None:
        _write_failure(axis, bar.failure, centre, *_past_mark(axis, bar, base, bar.failure))
    if bar.published is not None:
        height = max(bar.published, base) if chart.scale is Scale.BYTES else bar.published
        axis.plot(centre, height, zorder=5, **_PUBLISHED)


def _past_mark(axis: Axes, bar: Bar, base: float, text: str) -> tuple[float, float]:
    """Return the start of the text in place of a bar, and an offset in points that avoids a published value."""
    if bar.published is None or not _is_near(axis, base, bar.published, text):
        return base, 2
    return max(base, bar.published), 6


def _write_failure(axis: Axes, failure: str, centre: float, base: float, away: float = 2) -> None:
    failed = failure.rpartition(": ")[2] in _BAD_STATUSES
    text = (f"\N{BALLOT X} {failure}" if failed else failure).replace(": ", ":\n")
    _write_at_base(axis, text, centre, base, away, _FAILURE if failed else _NO_RESULT, rotation=90)


def _write_at_base(axis: Axes, text: str, centre: float, base: float, away: float, fill: str, rotation: int) -> None:
    box = {"facecolor": fill, "alpha": 0.25, "pad": 0.6, "linewidth": 0}
    _write(axis, text, centre, base, away, rotation=rotation, bbox=box)


def _write(axis: Axes, text: str, centre: float, height: float, away: float, **style: Any) -> None:
    """Write upright text past a height: above it, or below where `away` is negative."""
    axis.annotate(
        text, (centre, height), xytext=(0, away), textcoords="offset points", fontsize=LEAST_POINTS, ha="center",
        va="bottom" if away > 0 else "top", **{"rotation": 90, "color": INK, **style},
    )  # fmt: skip


def _write_above(axis: Axes, chart: Chart, bar: Bar, centre: float) -> None:
    """Write a bar's label past its end, and past the end of its interval."""
    assert bar.value is not None
    ends = [end for end in (bar.value, bar.total, *(bar.interval or ())) if end is not None]
    down = chart.scale in (Scale.RATIO, Scale.LINEAR) and bar.value < _BASES[chart.scale]
    end = min(ends) if down else max(ends)
    end = _cut(chart, max(end, _LOWEST_BYTES) if chart.scale is Scale.BYTES else end)
    away = 3
    if bar.published is not None and _is_near(axis, end, bar.published, bar.label or ""):
        end, away = (min if down else max)(end, bar.published), 6
    _write(axis, bar.label or "", centre, end, -away if down else away)


def _is_near(axis: Axes, end: float, mark: float, text: str) -> bool:
    """Return whether the mark of a published value would touch `text`, written upright at the end of a bar."""
    if axis.get_yscale() == "log" and min(end, mark) <= 0:
        return False
    places = (axis.transData + axis.transAxes.inverted()).transform([(0, end), (0, mark)])[:, 1]
    return bool(abs(places[1] - places[0]) < 0.7 * _height(text))  # an axis is longer than its values


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
        for value in (bar.value, bar.total, *(bar.interval or ())):
            if value is not None and math.isfinite(value) and (signed or value > 0):
                yield _cut(chart, value)
        if bar.published is not None and (signed or bar.published > 0):
            yield bar.published


def _draw_legend(figure: Figure, chart: Chart) -> None:
    handles: list[Any] = [Patch(color=colour(chart, series), label=series) for series in chart.series]
    if chart.parts is not None:
        handles += [Patch(color=INK, label=chart.parts[0]), Patch(color=INK, alpha=0.35, label=chart.parts[1])]
    if chart.published is not None and any(bar.published is not None for bar in chart.bars.values()):
        handles.append(Line2D([], [], label="published", **_PUBLISHED))
    if any(bar.undecided for bar in chart.bars.values()):
        handles.append(Patch(facecolor=(INK, 0.15), edgecolor=INK, label="no verdict"))
    _write_legend(figure, handles)


def _write_legend(figure: Figure, handles: Sequence[Any]) -> None:
    longest = max(len(handle.get_label()) for handle in handles)
    rows = math.ceil(len(handles) / max(1, _CHARACTERS // (longest + 6)))
    columns = math.ceil(len(handles) / rows)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)


def _draw_lines(chart: LineChart) -> Figure:
    figure = Figure(figsize=(WIDTH, 5.0), layout="constrained")
    axis = figure.subplots()
    for line in chart.lines:
        x, y = zip(*line.points, strict=True)
        shade = _shade(line)
        axis.plot(x, y, color=shade, linewidth=1.6, drawstyle="steps-post" if line.steps else "default")
        if len(x) == 1 or not line.steps:
            axis.plot(x, y, "o", color=shade, markersize=3.5)
    _set_line_axes(axis, chart)
    handles = [Line2D([], [], color=_shade(line), label=line.name) for line in chart.lines]
    for place, height, name in chart.published:
        axis.plot(place, height, zorder=5, **_PUBLISHED)
        handles.append(Line2D([], [], label=name, **_PUBLISHED))
    for place, name in chart.marks:
        axis.axvline(place, color=INK, linewidth=0.9, linestyle=":")
        axis.annotate(
            name, (place, 1), xycoords=("data", "axes fraction"), xytext=(-3, -3), textcoords="offset points",
            rotation=90, fontsize=8, ha="right", va="top", color=INK,
        )  # fmt: skip
    _write_legend(figure, handles)
    return figure


def _shade(line: Line) -> str:
    return COLOURS.get(line.name) or OTHER_COLOURS[line.shade % len(OTHER_COLOURS)]


def _set_line_axes(axis: Axes, chart: LineChart) -> None:
    axis.set_xlabel(chart.x_axis)
    axis.set_ylabel(chart.y_axis)
    axis.grid(color="#808080", alpha=0.3, linewidth=0.6)
    points = [point for line in chart.lines for point in line.points]
    points += [(x, y) for x, y, _ in chart.published]
    across = [x for x, _ in points] + [x for x, _ in chart.marks]
    for log, values, name in ((chart.x_log, across, "x"), (chart.y_log, [y for _, y in points], "y")):
        if log:
            low, high = min(values) / 1.15, max(values) * 1.15
            axis.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
            ticks = _LINE_TICKS if math.log10(high / low) <= 2.5 else _LINE_TICKS[::3]
            ruler = axis.xaxis if name == "x" else axis.yaxis
            _set_ticks(ruler, [tick for tick in ticks if low <= tick <= high], lambda value, _: f"{value:g}")
    if chart.percent:
        axis.set_ylim(0, 103)
