"""What a figure shows, as plain records: grouped bars, or lines. `draw.py` draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Scale(StrEnum):
    """How the value axis is laid out.

    RATIO: logarithmic, bars grow up and down from 1. BYTES: logarithmic, ticks at binary units, zeros marked as such.
    PERCENT: 0 to 100. LINEAR: bars grow up and down from 0.
    """

    LINEAR = "linear"
    RATIO = "ratio"
    BYTES = "bytes"
    PERCENT = "percent"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Attributes:
        interval: (low, high) of its whisker.
        total: where a second, lighter part that is stacked on it ends.
        published: a value from a paper, marked next to it.
        failure: what is written in its place where there is no value.
        undecided: it is drawn as an outline, because it has no verdict.
        label: written past its end.
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
    """A figure of grouped bars.

    Attributes:
        name: stem of the file.
        title: one line; the setting and a warning are added when it is drawn.
        axis: label of the value axis, with unit.
        groups: labels along the axis, one per workload; the last `summary_groups` are set apart (means).
        series: names of the bars within a group, in order; a series that is a mode has that mode's colour.
        bars: by (group, series); a missing key is an empty place.
        parts: names of the solid and of the lighter part, where bars are stacked.
        published: where the marked published values are from, if there are any.
        note: what a reader must know; it stands in the caption.
        shown: bars that end outside of it are cut there, with their value written in them.
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
        """Sentences that stand under the figure."""
        bars = self.bars.values()
        ends = [end for bar in bars for end in (bar.value, bar.total) if end is not None]
        low, high = self.shown
        sentences = [self.note] if self.note else []
        if any(not low <= end <= high for end in ends):
            sentences.append("Bars that would pass the axis are cut, with their value written in them.")
        if any(bar.undecided for bar in bars):
            sentences.append("An outline is a ratio without a verdict.")
        if self.published is not None and any(bar.published is not None for bar in bars):
            sentences.append(f"Published: {self.published}.")
        return tuple(sentences)


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
    """A figure of lines: a quantity against another, or the share of cases up to a value.

    Attributes:
        name, title, note: as of `Chart`.
        x_axis, y_axis: labels with units.
        x_log, y_log: whether an axis is logarithmic.
        marks: vertical lines with a name: "no change" at 1.
        published: points (x, y) from a paper with what they are.
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
        """Sentences that stand under the figure."""
        return (self.note,) if self.note else ()
