"""Exhibits that are a grid: a row for each workload, a series for each mode, published values next to measured ones.

The table and the figure are made of the same values, so that they cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from suite.report.chart import Bar, Chart, Scale
from suite.report.paper.exhibit import NOT_MEASURED, Exhibit, Made, Point, Results, geomean, reasons
from suite.report.table import make_table
from suite.results.stats import Verdict

GEOMEAN = "geomean"


@dataclass(frozen=True, slots=True)
class Value:
    """A number with its interval, or why there is none. `missing` may stand next to a number that is in no mean."""

    number: float | None = None
    interval: tuple[float, float] | None = None
    missing: str | None = None
    undecided: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """One bar of each group and one column of the table.

    Attributes:
        name: how bars are called; a mode has its colour.
        measure: the value of a workload.
        published: the paper's value of a workload, where it prints one.
        column: how the table's columns begin; by default the name.
        drawn, listed: whether the figure and the table have it.
        text: a bar's label.
    """

    name: str
    measure: Callable[[str], Value]
    published: Callable[[str], float | None] | None = None
    column: str = ""
    drawn: bool = True
    listed: bool = True
    text: Callable[[float], str] = "{:.2f}".format

    @property
    def stem(self) -> str:
        return self.column or self.name


@dataclass(frozen=True, slots=True)
class Mean:
    """What stands for a series in the group of means. `low` and `high` are None where it has no interval."""

    value: float
    count: int
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """What all rows of an exhibit share.

    Attributes:
        unit: how the table's columns end: "speedup", "percent", "bytes", "ratio".
        axis, scale, shown: of the figure.
        published: what the marked values are, before their source.
        more: further columns of a row; `more_columns` names them.
        note: what a reader of the figure must know.
    """

    unit: str
    axis: str
    scale: Scale
    labels: tuple[str, ...]
    series: tuple[Series, ...]
    published: str = ""
    more_columns: tuple[str, ...] = ()
    more: Callable[[str], Mapping[str, object]] = lambda label: {}
    note: str = ""
    shown: tuple[float, float] = (-math.inf, math.inf)


def ratio_series(results: Results, source: str, mode: str, baseline: str, **changes: object) -> Series:
    """How many times faster a mode is than another, with the paper's ratio of their counterparts."""
    series = Series(
        mode,
        lambda label: ratio_value(results, label, mode, baseline),
        lambda label: results.published_ratio(source, label, mode, baseline),
    )
    return replace(series, **changes)  # type: ignore[arg-type]


def ratio_value(results: Results, label: str, mode: str, baseline: str) -> Value:
    ratio, item = results.ratio(label, mode, baseline), results.against(label, mode, baseline)
    why = results.why_no_ratio(label, mode, baseline)
    if ratio is None or item is None:
        return Value(missing=why or NOT_MEASURED)
    return Value(ratio.value, (ratio.low, ratio.high), why, item.verdict in (Verdict.AMBG, None))


def known(number: float | None, why: str | None) -> Value:
    """A number without an interval, or the reason that there is none."""
    return Value(missing=why or NOT_MEASURED) if number is None else Value(number)


def ratio_means(
    results: Results, labels: Sequence[str], series: Iterable[tuple[str, str, str]]
) -> tuple[dict[str, Mean], int]:
    """Means of (name, mode, baseline) over the workloads that all of them have, by name, and how many these are."""
    named = list(series)
    found, count = results.means(labels, [(mode, baseline) for _, mode, baseline in named])
    return {
        name: Mean(mean.value, count, mean.low, mean.high)
        for name, mode, baseline in named
        if (mean := found.get((mode, baseline))) is not None
    }, count


def plain_means(grid: Grid) -> dict[str, Mean]:
    """Geometric means of each series over the workloads that have it."""
    found = {series.name: [series.measure(label).number for label in grid.labels] for series in grid.series}
    values = {name: [value for value in own if value] for name, own in found.items()}
    return {name: Mean(geomean(own), len(own)) for name, own in values.items() if own}


def make_grid(
    exhibit: Exhibit,
    results: Results,
    grid: Grid,
    means: Mapping[str, Mean] | None = None,
    points: Sequence[Point] = (),
    footer: Sequence[Mapping[str, object]] = (),
) -> Made:
    """The exhibit: its table, its figure if a drawn series has any number, and what it comes to.

    Args:
        means: by series, a last group of bars and a last row of the table.
        footer: further last rows.
    """
    means = means or {}
    drawn = tuple(series for series in grid.series if series.drawn)
    bars: dict[tuple[str, str], Bar] = {}
    rows = []
    for label in grid.labels:
        row: dict[str, object] = {"workload": label, **grid.more(label)}
        whys: dict[str, str | None] = {}
        for series in grid.series:
            value, paper = series.measure(label), series.published(label) if series.published else None
            if series.drawn:
                bars[label, series.name] = _bar(series, value, paper)
            if series.listed:
                row |= _columns(series, grid.unit, value.number, value.interval, paper)
                whys[series.stem] = value.missing
        rows.append(row | {"missing": reasons(whys)})
    for series in drawn:
        if mean := means.get(series.name):
            interval = (mean.low, mean.high) if mean.low is not None and mean.high is not None else None
            bars[GEOMEAN, series.name] = Bar(mean.value, interval, label=f"{mean.value:.2f}")
    title = exhibit.title(results.published)
    origin = results.provenance(grid.labels)
    chart = Chart(
        exhibit.stem,
        title,
        grid.axis,
        grid.scale,
        (*grid.labels, GEOMEAN) if means else grid.labels,
        tuple(series.name for series in drawn),
        bars,
        summary_groups=1 if means else 0,
        published=f"{grid.published}{results.published.sources[exhibit.source].setting}",
        note=grid.note,
        shown=grid.shown,
    )
    summary = [_mean_row(grid, means), *footer] if means else [*footer]
    table = make_table(exhibit.stem, title, exhibit.note(results), _all_columns(grid), rows, summary)
    has_values = any(bar.value is not None for bar in bars.values())
    return Made(table, chart if has_values else None, origin, tuple(points))


def _bar(series: Series, value: Value, paper: float | None) -> Bar:
    if value.number is None:
        why = value.missing or NOT_MEASURED
        return Bar(failure=NOT_MEASURED if why.endswith(NOT_MEASURED) else why, published=paper)
    interval = value.interval if value.interval and all(map(math.isfinite, value.interval)) else None
    return Bar(value.number, interval, None, paper, undecided=value.undecided, label=series.text(value.number) or None)


def _columns(
    series: Series,
    unit: str,
    number: object,
    interval: tuple[float | None, float | None] | None = None,
    paper: object = None,
) -> dict[str, object]:
    found = {f"{series.stem}_{unit}": number}
    if unit in ("speedup", "percent"):
        low, high = interval or (None, None)
        found |= {f"{series.stem}_low": low, f"{series.stem}_high": high}
    return found | ({f"{series.stem}_published_{unit}": paper} if series.published else {})


def _all_columns(grid: Grid) -> list[str]:
    columns = ["workload", *grid.more_columns]
    for series in grid.series:
        if series.listed:
            columns += _columns(series, grid.unit, None)
    return [*columns, "missing"]


def _mean_row(grid: Grid, means: Mapping[str, Mean]) -> dict[str, object]:
    row: dict[str, object] = {"workload": f"geomean of {max((mean.count for mean in means.values()), default=0)}"}
    for series in grid.series:
        if series.listed and (mean := means.get(series.name)):
            row |= {
                column: value
                for column, value in _columns(series, grid.unit, mean.value, (mean.low, mean.high)).items()
                if "published" not in column
            }
    return row
