"""Say how a figure or table of a paper is named here, what differs, and how it is made from results alone.

Most exhibits are a grid: a row for each workload, a series for each mode, published values next to measured ones. The
table and the figure of a grid are made of the same values, so that they cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from suite.measure.modes import DEFAULT_MODE, INDIRECTION_MODE, REFERENCE_MODE, UNPARTITIONED_MODE
from suite.micro.records import MicroRun
from suite.report import compare, provenance
from suite.report.chart import Bar, Chart, LineChart, Scale
from suite.report.compare import COMPARABLE, Comparison, Ratios
from suite.report.provenance import Provenance
from suite.report.published import Published
from suite.report.runs import Run
from suite.report.table import Table, make_table
from suite.results import stats
from suite.results.schema import Cell, Status
from suite.results.stats import Verdict

NOT_MEASURED = "not measured"
NOT_HELD = "not known here"
"""Stands for values that a paper prints and `results/published.json` lacks."""
NOTHING = Provenance("no run was given", "nothing measured", None, "none", None, count=0)
"""Provenance of what rests on no result at all."""
_VERDICTS = {
    Verdict.FAST: "faster",
    Verdict.SAME: "the same",
    Verdict.SLOW: "slower",
    Verdict.AMBG: "undecided",
    None: "without a verdict",
}


Means = dict[tuple[str, str], stats.GeometricMean]


@dataclass(frozen=True, slots=True)
class Proved:
    """Hold what `tests/gpu/concurrency_proof.py` found of one workload.

    Attributes:
        gain: device time of its graphs as chains over that with branches; None where no kernels are independent.
        branched: of its `graphs`, those that Encore would serve by branches.
        same_bits: whether results are the chain's; None where there were no branches.
        memory_ratio: reserved memory over that of a compilation without branches.
    """

    gain: float | None
    graphs: int
    branched: int
    same_bits: bool | None
    memory_ratio: float | None
    device: str


@dataclass(frozen=True)
class Results:
    """Hold everything exhibits are made of. Whatever was not given is missing, and is marked so."""

    published: Published
    ratios: Ratios | None = None
    micro: MicroRun | None = None
    nanogpt: Run | None = None
    """Rows of nanoGPT from before it was workloads of the suite; `run` has newer ones."""
    programs: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """Peak memory of small programs over stock's, by GPU and phase: `costs.read_programs`."""
    proved: Mapping[str, Proved] = field(default_factory=dict)
    """Chains against branches by workload: `concurrency.read_proof`."""

    @property
    def run(self) -> Run | None:
        return self.ratios.run if self.ratios is not None else None

    @property
    def whole_mode(self) -> str:
        """Return the mode next to a paper's whole system; until a run has the default mode, `indirection`."""
        return DEFAULT_MODE if self.run is not None and DEFAULT_MODE in self.run.modes else INDIRECTION_MODE

    def cell(self, label: str, mode: str) -> Cell | None:
        """Return the cell of this row in this mode, passed or not."""
        return self.run.find(label, mode) if self.run is not None else None

    def passed(self, label: str, mode: str) -> Cell | None:
        """Return the cell, if it passed."""
        cell = self.cell(label, mode)
        return cell if cell is not None and cell.status is Status.PASS else None

    def state(self, label: str, mode: str) -> str | None:
        """Return why this row has no number in this mode; None where it has passed."""
        cell = self.cell(label, mode)
        if cell is None:
            return NOT_MEASURED
        return None if cell.status is Status.PASS else cell.status.value

    def against(self, label: str, mode: str, baseline: str = REFERENCE_MODE) -> Comparison | None:
        """Compare a mode with another by host time; None where the mode was not run."""
        return None if self.ratios is None else self.ratios.find(label, mode, baseline)

    def ratio(self, label: str, mode: str, baseline: str = REFERENCE_MODE) -> stats.Ratio | None:
        """Return how many times faster than the baseline it is, where both ran."""
        item = self.against(label, mode, baseline)
        return None if item is None else item.ratio

    def gain(self, label: str, mode: str, baseline: str = REFERENCE_MODE) -> stats.Ratio | None:
        """Return the ratio where it is one of modes; see `Ratios.gain`."""
        return None if self.ratios is None else self.ratios.gain(label, mode, baseline)

    def why_no_ratio(self, label: str, mode: str, baseline: str = REFERENCE_MODE) -> str | None:
        """Return the reason where `ratio` is None, or where it is in no mean."""
        item = self.against(label, mode, baseline)
        if item is None:
            return NOT_MEASURED
        if item.ratio is None:
            return item.missing
        if item.kernels is not None and item.kernels not in COMPARABLE:
            return item.kernels.value
        return None if item.settled else compare.UNSETTLED

    def published_ratio(self, source: str, label: str, mode: str, baseline: str) -> float | None:
        """Return the paper's ratio of two modes' counterparts: its CUDA graphs are `graph`, its whole system
        `encore`."""
        names = {UNPARTITIONED_MODE: "graph", self.whole_mode: "encore"}
        printed = self.published.printed(source, label)
        key = f"{names.get(mode, mode)}_over_{names.get(baseline, baseline)}"
        return self.published.speedups.get(source, {}).get(printed, {}).get(key)

    def means(self, labels: Iterable[str], pairs: Sequence[tuple[str, str]]) -> Means:
        """Return the means of (mode, baseline) over the workloads that all of them have; see `Ratios.means`."""
        return {} if self.ratios is None else self.ratios.means(labels, pairs)

    def mean_text(self, labels: Iterable[str], mode: str, baseline: str) -> str:
        """Write the geometric mean over these workloads with interval and count, or "not measured"."""
        found = self.means(labels, [(mode, baseline)])
        return compare.mean_text(found[mode, baseline]) if found else NOT_MEASURED

    def verdicts_text(self, labels: Iterable[str], mode: str, baseline: str) -> str:
        """Say in how many workloads the mode is faster, the same, slower or undecided."""
        counts = self.ratios.verdicts(labels, mode, baseline) if self.ratios is not None else {}
        return ", ".join(f"{word} {counts[one]}" for one, word in _VERDICTS.items() if counts.get(one)) or NOT_MEASURED

    def extreme_text(self, labels: Iterable[str], mode: str, baseline: str, *, largest: bool = True) -> str:
        """Write the largest (or smallest) gain and its workload."""
        gains = {label: gain.value for label in labels if (gain := self.gain(label, mode, baseline)) is not None}
        if not gains:
            return NOT_MEASURED
        label = (max if largest else min)(gains, key=gains.__getitem__)
        return f"{gains[label]:.2f} ({label})"

    def provenance(self, labels: Iterable[str] | None = None) -> Provenance:
        """Return where what rests on the run, or on these rows of it, is from."""
        if self.run is None:
            return NOTHING
        whole = provenance.of_run(self.run)
        return whole if labels is None else whole.among(labels)


@dataclass(frozen=True, slots=True)
class Point:
    """Hold what an exhibit comes to, in one line: a quantity as published and as measured."""

    quantity: str
    published: str | float | int | None
    measured: str | None = NOT_MEASURED


@dataclass(frozen=True, slots=True)
class Made:
    """Hold an exhibit: its table always, its figure where there is one to draw, and where its numbers are from."""

    table: Table
    chart: Chart | LineChart | None
    provenance: Provenance
    points: tuple[Point, ...] = ()


@dataclass(frozen=True, slots=True)
class Exhibit:
    """Describe a figure or table of a paper, as this suite can make it.

    Attributes:
        name: how `encore report --only` calls it: "fig10", "pygraph-table2".
        source: key of the paper in `results/published.json`.
        number: what the paper calls it: "Fig. 10".
        shows: what it shows, in one line.
        differs: what is measured differently from the paper, beyond GPU and versions.
        make: makes table and figure.
        needs_runs: False for what is known without any run.
    """

    name: str
    source: str
    number: str
    shows: str
    differs: str
    make: Callable[[Exhibit, Results], Made]
    needs_runs: bool = True

    @property
    def stem(self) -> str:
        """Return the stem of the names of its files: those of the papers are apart from the report's own."""
        return f"paper_{self.name.replace('-', '_')}"

    def title(self, published: Published) -> str:
        return f"{published.sources[self.source].label} {self.number}: {self.shows}"

    def note(self, results: Results, origin: Provenance | None = None) -> str:
        """Return the line on what differs: machine and versions of both sides, then the way of measuring."""
        here = origin or results.provenance()
        measured = f"Measured: {here.device}, PyTorch {here.torch}. " if here is not NOTHING else ""
        return f"{measured}Published: {results.published.sources[self.source].setting}. {self.differs}"


def labels_of(results: Results, source: str) -> tuple[str, ...]:
    """Return the paper's workloads in this suite's order, measured or not."""
    return tuple(sorted(results.published.workloads[source]))


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers that have no interval."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def reasons(found: Mapping[str, str | None]) -> str | None:
    """Return which modes lack a number, and why: "indirection: fail_accuracy"; of equal reasons only one."""
    if not (lacking := {mode: why for mode, why in found.items() if why}):
        return None
    if len(lacking) == len(found) and len(set(lacking.values())) == 1:
        return next(iter(lacking.values()))
    return "; ".join(f"{mode}: {why}" for mode, why in lacking.items())


GEOMEAN = "geomean"


@dataclass(frozen=True, slots=True)
class Value:
    """Hold a number with its interval, or why there is none. `missing` may stand next to a number that no mean has."""

    number: float | None = None
    interval: tuple[float, float] | None = None
    missing: str | None = None
    undecided: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """Describe one bar of each group and one column of the table.

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
    """Hold the mean of a series in the group of means. `low` and `high` are None where it has no interval."""

    value: float
    count: int
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """Hold what all rows of an exhibit share.

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
    """Return how many times faster a mode is than another, with the paper's ratio of their counterparts."""
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
    """Return a number without an interval, or the reason that there is none."""
    return Value(missing=why or NOT_MEASURED) if number is None else Value(number)


def ratio_means(
    results: Results, labels: Sequence[str], series: Iterable[tuple[str, str, str]]
) -> tuple[dict[str, Mean], int]:
    """Return by name means of (name, mode, baseline) over the workloads that all of them have, and their number."""
    named = list(series)
    found = results.means(labels, [(mode, baseline) for _, mode, baseline in named])
    means = {
        name: Mean(mean.value, mean.count, mean.low, mean.high)
        for name, mode, baseline in named
        if (mean := found.get((mode, baseline))) is not None
    }
    return means, max((mean.count for mean in means.values()), default=0)


def plain_means(grid: Grid) -> dict[str, Mean]:
    """Return the geometric means of each series over the workloads that have it."""
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
    """Make the exhibit: its table, its figure if a drawn series has any number, and what it comes to.

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
