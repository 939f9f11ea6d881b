"""What a figure shows, as plain records: groups of bars, one bar per group and series. Drawing is `draw.py`'s."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Scale(StrEnum):
    """How the value axis is laid out.

    RATIO: logarithmic, bars grow up and down from 1. BYTES: logarithmic, ticks at binary units, zeros marked as such.
    PERCENT: 0 to 100. LINEAR: from 0.
    """

    LINEAR = "linear"
    RATIO = "ratio"
    BYTES = "bytes"
    PERCENT = "percent"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. `interval` is its (low, high); `total` is where a second, lighter part stacked on it ends; `published`
    is a value from a paper to mark next to it; `failure` is written in its place where there is no value. A bar that is
    `undecided` is drawn as an outline: its samples do not tell it from the base. `label` is written above its end.
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
        title: one line; provenance and warning are added when it is drawn.
        axis: label of the value axis, with unit.
        groups: labels along the axis, one per workload; the last `summary_groups` are set apart (means).
        series: names of the bars within a group, in order; a series that is a mode has that mode's colour.
        bars: by (group, series); a missing key is an empty place.
        parts: names of the solid and of the lighter part, where bars are stacked.
        published: what the marks for published values show and where that is from, where there are any.
        note: what a reader must know, below the figure.
        shown: bars that end outside of it are cut there, with their value written in them; without this, one extreme
            bar would leave no room for the others.
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
