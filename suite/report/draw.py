"""Draw a `Chart` with matplotlib, and write it as PNG, PDF or as SVG for the page.

Without pyplot: no global state, no window. The same chart gives the same bytes (no dates, fixed ids). Colours are from
the palette of M. Okabe and K. Ito, which colour-blind readers can tell apart; text in the SVG takes the page's colour.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from optimizations.byte_units import format_bytes
from suite.modes import MODES
from suite.report.chart import Bar, Chart, Scale
from suite.report.provenance import Provenance
from suite.schema import Status

INK = "#123450"
"""Colour of all text and lines; in an SVG it is replaced by the page's own (`currentColor`)."""
WARNING = "#D55E00"
_FAILURE = "#C4001A"
_NO_RESULT = "#808080"
"""Behind the words that stand where a bar would be: of a cell that failed, and of one without a result. No mode has
these colours, so that a failure does not look like one of its bars."""
_BAD_STATUSES = frozenset(status.value for status in Status if status is not Status.PASS)
COLOURS = {mode.name: mode.colour for mode in MODES.values() if mode.colour is not None}
"""Of series by their names: modes, and Encore as a whole."""
OTHER_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C8C8C")
_GROUPS_PER_PANEL = 15
_CHARACTERS_PER_INCH = 12
"""Of titles and notes, a little less than fit at their size."""
_GROUP_SHARE = 0.86
"""Part of a group's width that its bars take."""
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
    "pdf.fonttype": 42,
}
_FINE_TICKS = (0.25, 0.35, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 4)
_COARSE_TICKS = (0.01, 0.03, 0.06, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128)
PUBLISHED_MARK: dict[str, Any] = {
    "linestyle": "",
    "marker": "D",
    "markersize": 4.5,
    "markerfacecolor": "white",
    "markeredgecolor": INK,
    "markeredgewidth": 1.0,
    "clip_on": False,
}
_PAGE_FONTS = "'DejaVu Sans', Verdana, sans-serif"
"""Fonts of text in a page: a reader without the first one has the second, which is as wide."""
_AXIS_CHARACTERS = 37
"""In a line of the name of an axis: more would be longer than a panel is high."""
_LOWEST_BYTES = 1.0
"""Where the byte axis begins: a bar of 0 bytes has no height there and is marked "0"."""


def draw(chart: Chart, provenance: Provenance) -> Figure:
    """The chart as a figure: at most 15 groups side by side; more are spread evenly over panels, one below another."""
    with matplotlib.rc_context(STYLE):
        panels = _panels(chart.groups)
        width = max(7.5, 1.1 + 0.92 * max(len(panel) for panel in panels))
        figure = Figure(figsize=(width, 1.9 + 3.1 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, sharey=True)[:, 0]
        for axis, groups in zip(axes, panels, strict=True):
            _draw_panel(axis, chart, groups)
        _set_scale(axes[0], chart)
        _draw_text(figure, chart, provenance)
        lay_out(figure)
    return figure


def lay_out(figure: Figure) -> None:
    """Finds every part's place once: a figure is written in three forms, and each would look for them again."""
    figure.draw_without_rendering()
    figure.set_layout_engine(None)  # with "none" each form would be laid out once more


def to_png(figure: Figure) -> bytes:
    """The figure as PNG, 150 dots per inch, on white."""
    return rendered(figure, "png", dpi=150, facecolor="white", metadata={"Software": None})


def to_pdf(figure: Figure) -> bytes:
    """The figure as PDF, with text as text."""
    return rendered(figure, "pdf", facecolor="white", metadata={"CreationDate": None})


def to_svg(figure: Figure, name: str) -> str:
    """Return the figure as a small `<svg>` element for a page.

    Text stays text, in the page's colour. Ids begin with `name`. Coordinates have one decimal: a tenth of a point.
    """
    data = rendered(figure, "svg", transparent=True, metadata={"Date": None, "Creator": None}).decode()
    element = data[data.index("<svg") :].replace(INK.lower(), "currentColor")
    element = element.replace(" font-family: 'DejaVu Sans';", "").replace(
        "<svg ", f'<svg font-family="{_PAGE_FONTS}" ', 1
    )
    element = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|(?<=>)\s+(?=<)", "", element, flags=re.DOTALL)
    element = re.sub(r"<g[^>]*/>", "", element)
    element = re.sub(r"(\d\.\d)\d+", r"\1", re.sub(r"\s*\n\s*", " ", element))
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', element))
    element = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", element)
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", element)


def colour(chart: Chart, series: str) -> str:
    """The colour of a series: a mode's own, or the next of the palette that no mode of the chart has."""
    if series in COLOURS:
        return COLOURS[series]
    taken = {COLOURS.get(name) for name in chart.series}
    free = [each for each in OTHER_COLOURS if each not in taken]
    return free[[name for name in chart.series if name not in COLOURS].index(series) % len(free)]


def rendered(figure: Figure, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=form, **options)
    return buffer.getvalue()


def _panels(groups: tuple[str, ...]) -> list[tuple[str, ...]]:
    count = max(1, math.ceil(len(groups) / _GROUPS_PER_PANEL))
    size = max(1, math.ceil(len(groups) / count))
    return [groups[start : start + size] for start in range(0, max(1, len(groups)), size)]


def _draw_panel(axis: Axes, chart: Chart, groups: tuple[str, ...]) -> None:
    width = _GROUP_SHARE / max(1, len(chart.series))
    for place, group in enumerate(groups):
        common = _common_failure(chart, group)
        if common is not None:
            base = {Scale.RATIO: 1.0, Scale.BYTES: _LOWEST_BYTES}.get(chart.scale, 0.0)
            _write_failure(axis, common, place, base)
        for position, series in enumerate(chart.series):
            bar = chart.bars.get((group, series))
            if bar is not None:
                bar = replace(bar, failure=None) if common is not None else bar
                centre = place + (position - (len(chart.series) - 1) / 2) * width
                _draw_bar(axis, chart, bar, centre, width, colour(chart, series))
    axis.set_xticks(range(len(groups)), groups, rotation=30 if len(groups) > 6 else 0, rotation_mode="anchor")
    for label in axis.get_xticklabels():
        label.set_horizontalalignment("right" if len(groups) > 6 else "center")
    axis.set_xlim(-0.6, len(groups) - 0.4)
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel(textwrap.fill(chart.axis, _AXIS_CHARACTERS))
    axis.grid(axis="y", color="#808080", alpha=0.3, linewidth=0.6)
    axis.set_axisbelow(True)
    if chart.summary_groups and groups[-1] == chart.groups[-1]:
        axis.axvline(len(groups) - chart.summary_groups - 0.5, color=INK, linewidth=0.8, linestyle=":")
    if chart.scale is Scale.RATIO:
        axis.axhline(1, color=INK, linewidth=0.9)


def _common_failure(chart: Chart, group: str) -> str | None:
    """The reason that all bars of a group lack their value for: it is written once."""
    found = [bar for series in chart.series if (bar := chart.bars.get((group, series))) is not None]
    reasons = {bar.failure for bar in found if bar.value is None}
    return reasons.pop() if len(found) > 1 and len(reasons) == 1 and all(bar.value is None for bar in found) else None


def _draw_bar(axis: Axes, chart: Chart, bar: Bar, centre: float, width: float, fill: str) -> None:
    base = {Scale.RATIO: 1.0, Scale.BYTES: _LOWEST_BYTES}.get(chart.scale, 0.0)
    if bar.value is not None:
        top = max(bar.value, base) if chart.scale is Scale.BYTES else _cut(chart, bar.value)
        style: dict[str, Any] = {"color": fill, "linewidth": 0}
        if bar.undecided:
            style = {"facecolor": "none", "edgecolor": fill, "linewidth": 1.2}
        axis.bar(centre, top - base, width * 0.94, bottom=base, **style)
        end = bar.value
        if bar.total is not None and bar.total > bar.value:
            end = bar.total
            axis.bar(centre, _cut(chart, end) - top, width * 0.94, bottom=top, color=fill, alpha=0.35, linewidth=0)
        if _cut(chart, end) != end:
            _write_at_cut(axis, chart, end, centre)
        if bar.value == 0 and bar.total is None and bar.label is None:
            _write_at_base(axis, "0", centre, *_past_mark(chart, bar, base, "0"), fill, rotation=0)
    elif bar.failure is not None:
        _write_failure(axis, bar.failure, centre, *_past_mark(chart, bar, base, bar.failure))
    if bar.value is not None and bar.interval is not None and _cut(chart, bar.value) == bar.value:
        below, above = bar.value - bar.interval[0], bar.interval[1] - bar.value
        axis.errorbar(centre, bar.value, [[below], [above]], color=INK, linewidth=0.9, capsize=1.6)
    if bar.value is not None and bar.label is not None:
        _write_above(axis, chart, bar, centre)
    if bar.published is not None:
        height = max(bar.published, base) if chart.scale is Scale.BYTES else bar.published
        axis.plot(centre, height, zorder=5, **PUBLISHED_MARK)


def _past_mark(chart: Chart, bar: Bar, base: float, text: str) -> tuple[float, float]:
    """Where what stands for a bar begins, and how many points above that: past a published value in its way."""
    if bar.published is None or not _is_near(chart, base, bar.published, text):
        return base, 2
    return max(base, bar.published), 6


def _write_failure(axis: Axes, failure: str, centre: float, base: float, away: float = 2) -> None:
    failed = failure.rpartition(": ")[2] in _BAD_STATUSES
    text = f"\N{BALLOT X} {failure}" if failed else failure
    _write_at_base(axis, text, centre, base, away, _FAILURE if failed else _NO_RESULT, rotation=90)


def _write_at_base(axis: Axes, text: str, centre: float, base: float, away: float, fill: str, rotation: int) -> None:
    axis.annotate(
        text, (centre, base), xytext=(0, away), textcoords="offset points", rotation=rotation, fontsize=6.5,
        ha="center", va="bottom", color=INK, bbox={"facecolor": fill, "alpha": 0.25, "pad": 0.6, "linewidth": 0},
    )  # fmt: skip


def _write_above(axis: Axes, chart: Chart, bar: Bar, centre: float) -> None:
    """A bar's label past its end, and past the end of its interval."""
    assert bar.value is not None
    ends = [end for end in (bar.value, bar.total, *(bar.interval or ())) if end is not None]
    down = chart.scale is Scale.RATIO and bar.value < 1
    end = min(ends) if down else max(ends)
    end = _cut(chart, max(end, _LOWEST_BYTES) if chart.scale is Scale.BYTES else end)
    away = 3
    if bar.published is not None and _is_near(chart, end, bar.published, bar.label or ""):
        end, away = (min if down else max)(end, bar.published), 6
    axis.annotate(
        bar.label or "", (centre, end), xytext=(0, -away if down else away),
        textcoords="offset points", rotation=90, fontsize=6.5, ha="center", va="top" if down else "bottom", color=INK,
    )  # fmt: skip


def _is_near(chart: Chart, end: float, mark: float, text: str) -> bool:
    """Whether the mark of a published value would touch `text`, written upright at the end of a bar."""
    share = 0.05 + 0.03 * len(text)
    values = list(_drawn_values(chart))
    if chart.scale in (Scale.RATIO, Scale.BYTES):
        ends = (0.85, 1.2) if chart.scale is Scale.RATIO else (_LOWEST_BYTES, 2.0)
        span = math.log2(max([ends[1], *values]) / min([ends[0], *values]))
        return bool(mark > 0 and end > 0 and abs(math.log2(mark / end)) < share * span)
    return abs(mark - end) < share * max([1e-9, *values])


def _write_at_cut(axis: Axes, chart: Chart, value: float, centre: float) -> None:
    """The value of a bar that is cut, inside its end."""
    text = f"{value:.2f}\N{MULTIPLICATION SIGN}" if chart.scale is Scale.RATIO else f"{value:,.0f}"
    down = value < chart.shown[0]
    axis.annotate(
        text, (centre, _cut(chart, value)), xytext=(0, 2 if down else -2), textcoords="offset points", rotation=90,
        fontsize=6.5, ha="center", va="bottom" if down else "top", color=INK,
    )  # fmt: skip


def _cut(chart: Chart, value: float) -> float:
    """The value, or the end of what is shown where it lies outside."""
    low, high = chart.shown
    return min(max(value, low), high)


def _set_scale(axis: Axes, chart: Chart) -> None:
    """Limits and ticks of the value axis, which all panels share."""
    values = list(_drawn_values(chart))
    labels = any(bar.label for bar in chart.bars.values())
    if chart.scale is Scale.RATIO:
        axis.set_yscale("log")
        low, high = min([0.85, *values]) / 1.08, max([1.2, *values]) * 1.08
        if labels:
            low, high = low / (high / low) ** 0.12, high * (high / low) ** 0.12
        axis.set_ylim(low, high)
        ticks = _FINE_TICKS if low > 0.2 and high < 5 else _COARSE_TICKS
        axis.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}\N{MULTIPLICATION SIGN}"))
        axis.yaxis.set_minor_locator(NullLocator())
    elif chart.scale is Scale.BYTES:
        axis.set_yscale("log", base=2)
        exponent = max(1, math.ceil(math.log2(max([2.0, *values]))))
        axis.set_ylim(_LOWEST_BYTES, 2.0 ** (exponent * 1.2 if labels else exponent + 1))
        axis.yaxis.set_major_locator(FixedLocator([2.0**power for power in range(0, exponent + 2, 5)]))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value).replace(".0 ", " ")))
        axis.yaxis.set_minor_locator(NullLocator())
    elif chart.scale is Scale.PERCENT:
        axis.set_ylim(0, 122 if labels else 105)
        axis.yaxis.set_major_locator(FixedLocator([0, 20, 40, 60, 80, 100]))
    else:
        axis.set_ylim(0, (1.2 if labels else 1.06) * max([1e-9, *values]))


def _drawn_values(chart: Chart) -> Iterator[float]:
    for bar in chart.bars.values():
        for value in (bar.value, bar.total, *(bar.interval or ())):
            if value is not None and math.isfinite(value) and value > 0:
                yield _cut(chart, value)
        if bar.published is not None and bar.published > 0:
            yield bar.published


def _draw_text(figure: Figure, chart: Chart, provenance: Provenance) -> None:
    """Title with warning and provenance at the top, note and legend at the foot."""
    lines = [line for line in (provenance.warning, chart.title, provenance.caption) if line]
    title = "\n".join(wrapped(figure, line) for line in lines)
    figure.suptitle(title, fontsize=10, color=WARNING if provenance.warning else INK)
    handles: list[Any] = [Patch(color=colour(chart, series), label=series) for series in chart.series]
    if chart.parts is not None:
        handles += [
            Patch(color=INK, label=chart.parts[0]),
            Patch(color=INK, alpha=0.35, label=chart.parts[1]),
        ]
    notes = [chart.note]
    ends = [end for bar in chart.bars.values() for end in (bar.value, bar.total) if end is not None]
    if any(_cut(chart, end) != end for end in ends):
        notes.append("Bars that would pass the axis are cut, with their value written in them.")
    if chart.published is not None and any(bar.published is not None for bar in chart.bars.values()):
        handles.append(Line2D([], [], label="published", **PUBLISHED_MARK))
        notes.append(f"Published: {chart.published}.")
    if any(bar.undecided for bar in chart.bars.values()):
        handles.append(Patch(facecolor="none", edgecolor=INK, label="no verdict, or AMBG"))
    longest = max(len(handle.get_label()) for handle in handles)
    rows = math.ceil(len(handles) / max(1, int(figure.get_figwidth() * _CHARACTERS_PER_INCH / (longest + 6))))
    legend = figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=math.ceil(len(handles) / rows),
        frameon=False,
        fontsize=8.5,
        title="\n".join(wrapped(figure, note) for note in notes if note) or None,
        title_fontsize=8.5,
    )
    legend.get_title().set_multialignment("center")


def wrapped(figure: Figure, text: str) -> str:
    return textwrap.fill(text, int(figure.get_figwidth() * _CHARACTERS_PER_INCH))
