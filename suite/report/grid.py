"""Describe values by workload and series; a table and a figure of a grid are made of the same values.

So the two cannot differ. A row is a workload, a series is usually a mode, with published values next to measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean

from suite.report.chart import GEOMEAN, Bar, Chart, Scale
from suite.report.provenance import Provenance
from suite.report.table import Row
from suite.results.stats import Ratio

NOT_MEASURED = "not measured"
WHISKERS = "Whiskers: 95 % intervals."


@dataclass(frozen=True, slots=True)
class Point:
    """Hold one result of an exhibit: a quantity as published and as measured."""

    quantity: str
    published: str | float | int | None
    measured: str | None = NOT_MEASURED


@dataclass(frozen=True, slots=True)
class Series:
    """Describe one bar of each group and one column of the table.

    Attributes:
        name: label of the bars; a mode has its colour.
        measure: returns the value of a workload, or the reason why there is none; without both nothing is drawn.
        published: returns the paper's value of a workload, if it prints one.
        column: prefix of the table's columns; by default the name.
        drawn, listed: whether the figure and the table include it.
        text: a bar's label.
    """

    name: str
    measure: Callable[[str], Bar]
    published: Callable[[str], float | None] | None = None
    column: str = ""
    drawn: bool = True
    listed: bool = True
    text: Callable[[float], str] = "{:.2f}".format

    def bar(self, label: str) -> Bar:
        """Return the value of a workload with the published one."""
        return replace(self.measure(label), published=self.published(label) if self.published else None)

    def columns(self, unit: str, bar: Bar, *, printed: bool = True) -> dict[str, object]:
        """Return a value as columns of the table."""
        stem = self.column or self.name
        found: dict[str, object] = {f"{stem}_{unit}": bar.value}
        if unit in ("speedup", "percent"):
            low, high = bar.interval or (None, None)
            found |= {f"{stem}_low": low, f"{stem}_high": high}
        return found | ({f"{stem}_published_{unit}": bar.published} if self.published and printed else {})


@dataclass(frozen=True, slots=True)
class Grid:
    """Hold values by workload and series.

    Attributes:
        unit: suffix of the table's columns: "speedup", "percent", "bytes", "ratio".
        axis, scale, shown: of the figure.
        points: its results.
        published: description of the marked values, before their source.
        more: further columns of a row.
        note: remarks on the figure and the table.
        means: by series, a last group of bars and a last row of the table.
        footer: further last rows.
        group: the kind of a row; origin: provenance of the values, by default the rows of these workloads.
    """

    unit: str
    axis: str
    scale: Scale
    labels: tuple[str, ...]
    series: tuple[Series, ...]
    points: Sequence[Point] = ()
    published: str = ""
    more: Callable[[str], Row] = lambda label: {}
    note: str = ""
    shown: tuple[float, float] = (-math.inf, math.inf)
    means: Mapping[str, Ratio] = field(default_factory=dict)
    footer: Sequence[Row] = ()
    group: str = "workload"
    origin: Provenance | None = None

    def plain_means(self) -> dict[str, Ratio]:
        """Return the geometric means of each series over the workloads that have it."""
        found = {series.name: [series.measure(label).value for label in self.labels] for series in self.series}
        values = {name: [value for value in own if value] for name, own in found.items()}
        return {name: plain_mean(own) for name, own in values.items() if own}

    def chart(self, name: str, title: str, source: str) -> Chart:
        """Return the figure; `source` describes where published values are from."""
        drawn = [series for series in self.series if series.drawn]
        bars = {(label, series.name): _drawn(series, series.bar(label)) for label in self.labels for series in drawn}
        bars |= {
            (GEOMEAN, series.name): replace(_mean_bar(mean), label=f"{mean.value:.2f}")
            for series in drawn
            if (mean := self.means.get(series.name)) is not None
        }
        return Chart(
            name,
            title,
            self.axis,
            self.scale,
            (*self.labels, *([GEOMEAN] if self.means else [])),
            tuple(series.name for series in drawn),
            bars,
            published=f"{self.published}{source}",
            note=self.note,
            shown=self.shown,
        )

    def rows(self) -> tuple[list[Row], list[Row]]:
        """Return the rows of the table, and those below them."""
        listed = [series for series in self.series if series.listed]
        rows: list[Row] = []
        for label in self.labels:
            row: dict[str, object] = {self.group: label}
            whys: dict[str, str | None] = {}
            for series in listed:
                bar = series.bar(label)
                row |= series.columns(self.unit, bar)
                whys[series.column or series.name] = bar.failure
            rows.append({**row, **self.more(label), "missing": reasons(whys)})
        ends: dict[str, object] = {self.group: f"geomean of {mean_count(self.means)}"}
        for series in listed:
            if (mean := self.means.get(series.name)) is not None:
                ends |= series.columns(self.unit, _mean_bar(mean), printed=False)
        return rows, [*([ends] if self.means else []), *self.footer]


def plain_mean(values: Sequence[float]) -> Ratio:
    """Return the geometric mean of positive numbers that have no interval."""
    return Ratio(geometric_mean(values), math.nan, math.nan, count=len(values))


def _mean_bar(mean: Ratio) -> Bar:
    return Bar(mean.value, mean.interval() if math.isfinite(mean.low) else None)


def known(value: float | None, why: str | None) -> Bar:
    """Return a number without an interval, or the reason that there is none."""
    return Bar(failure=why or NOT_MEASURED) if value is None else Bar(value)


def count_note(means: Mapping[str, Ratio]) -> str:
    """Describe the whiskers and means of a figure for its caption."""
    return f"{WHISKERS} Geomean: the {mean_count(means)} workloads that all modes have." if means else ""


def mean_count(means: Mapping[str, Ratio]) -> int:
    """Return the number of workloads that the means go over."""
    return max((mean.count for mean in means.values()), default=0)


def reasons(found: Mapping[str, str | None]) -> str | None:
    """Return the modes without a number, with reasons: "indirection: fail_accuracy"; equal reasons only once."""
    if not (lacking := {mode: why for mode, why in found.items() if why}):
        return None
    if len(lacking) == len(found) and len(set(lacking.values())) == 1:
        return next(iter(lacking.values()))
    return "; ".join(f"{mode}: {why}" for mode, why in lacking.items())


def _drawn(series: Series, bar: Bar) -> Bar:
    if bar.value is None:
        why = bar.failure
        return replace(bar, failure=NOT_MEASURED if why is not None and why.endswith(NOT_MEASURED) else why)
    return replace(bar, failure=None, label=bar.label or series.text(bar.value) or None)
