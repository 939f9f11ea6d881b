"""Describe figures and tables of papers: names, differences, and how to make them from results alone.

Most exhibits are a grid: a row for each workload, a series for each mode, published values next to measured ones. The
table and the figure of a grid are made of the same values, so that they cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from suite.measure.modes import DEFAULT_MODE, INDIRECTION_MODE, REFERENCE_MODE
from suite.micro.records import MicroRun
from suite.report import compare, provenance
from suite.report.chart import Bar, Chart, LineChart, Scale
from suite.report.compare import Ratios
from suite.report.provenance import Provenance
from suite.report.published import Published
from suite.report.runs import Run
from suite.report.table import Row, Table, make_table
from suite.results.schema import Cell, Status
from suite.results.stats import Ratio, Verdict

NOT_MEASURED = "not measured"
NOT_HELD = "not known here"
"""The mark of values that a paper prints and `results/published.json` lacks."""
NOTHING = Provenance("no run was given", "nothing measured", None, "none", None, count=0)
"""Provenance of values that do not depend on results."""
WHISKERS = "Whiskers: 95 % intervals."
GEOMEAN = "geomean"
_VERDICTS = {
    Verdict.FAST: "faster",
    Verdict.SAME: "the same",
    Verdict.SLOW: "slower",
    Verdict.AMBG: "undecided",
    None: "without a verdict",
}


@dataclass(frozen=True, slots=True)
class Proved:
    """Hold the results of `tests/gpu/concurrency_proof.py` for one workload.

    Attributes:
        gain: device time of its graphs as chains over that with branches; None where no kernels are independent.
        branched: of its `graphs`, those for which Encore would use branches.
        same_bits: whether results are bitwise equal to the chain's; None where there were no branches.
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
    """Hold the input of all exhibits. Missing parts are marked as missing."""

    published: Published
    ratios: Ratios | None = None
    micro: MicroRun | None = None
    nanogpt: Run | None = None
    """Rows of nanoGPT before it became workloads of the suite; `run` has newer ones."""
    programs: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """Peak memory of small programs over stock's, by GPU and phase: `costs.read_programs`."""
    proved: Mapping[str, Proved] = field(default_factory=dict)
    """Chains against branches by workload: `concurrency.read_proof`."""

    @property
    def run(self) -> Run | None:
        return self.ratios.run if self.ratios is not None else None

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels of the run's rows."""
        return self.run.labels if self.run is not None else ()

    @property
    def whole_mode(self) -> str:
        """Return the mode that corresponds to a paper's whole system: the default mode, else `indirection`."""
        return DEFAULT_MODE if self.run is not None and DEFAULT_MODE in self.run.modes else INDIRECTION_MODE

    def cell(self, label: str, mode: str) -> Cell | None:
        """Return the cell of this row in this mode, passed or not."""
        return self.run.find(label, mode) if self.run is not None else None

    def passed(self, label: str, mode: str) -> Cell | None:
        """Return the cell, if it passed."""
        cell = self.cell(label, mode)
        return cell if cell is not None and cell.status is Status.PASS else None

    def state(self, label: str, mode: str) -> str | None:
        """Return the reason why this row has no number in this mode; None if it passed."""
        cell = self.cell(label, mode)
        if cell is None:
            return NOT_MEASURED
        return None if cell.status is Status.PASS else cell.status.value

    def metric(self, label: str, mode: str, path: str) -> Any:
        """Return the metric of this row at a path of fields; None if it was not measured, or the cell failed."""
        cell = self.passed(label, mode)
        return None if cell is None else cell.at(f"metrics.{path}")

    def ratio(self, label: str, mode: str, baseline: str = REFERENCE_MODE) -> Bar:
        """Return the speed-up of the mode over the baseline by host time.

        A ratio with different kernels, or of a mode that had not settled, has `failure` set too: means leave it out.
        """
        item = None if self.ratios is None else self.ratios.find(label, mode, baseline)
        if item is None or item.ratio is None:
            return Bar(failure=(item and item.missing) or NOT_MEASURED)
        why = None if item.is_gain else item.mark
        undecided = item.verdict in (Verdict.AMBG, None)
        return Bar(item.ratio.value, item.ratio.interval(), failure=why, undecided=undecided)

    def gains(self, labels: Iterable[str], mode: str, baseline: str = REFERENCE_MODE) -> dict[str, float]:
        """Return the ratios of these rows that compare settled modes with the same kernels."""
        found = {label: self.ratio(label, mode, baseline) for label in labels}
        return {label: one.value for label, one in found.items() if one.value is not None and one.failure is None}

    def published_ratio(self, source: str, label: str, mode: str, baseline: str) -> float | None:
        """Return the paper's ratio of the corresponding modes; its whole system is `encore`."""
        names = (DEFAULT_MODE if one == self.whole_mode else one for one in (mode, baseline))
        return self.published.speedup(source, label, *names)

    def means(self, labels: Iterable[str], modes: Sequence[str], baseline: str) -> dict[str, Ratio]:
        """Return the means of these modes over the workloads that all of them have; see `Ratios.means`."""
        pairs = [(mode, baseline) for mode in modes]
        found = {} if self.ratios is None else self.ratios.means(labels, pairs)
        return {mode: mean for (mode, _), mean in found.items()}

    def mean_text(self, labels: Iterable[str], mode: str, baseline: str) -> str:
        """Write the geometric mean over these workloads with interval and count, or "not measured"."""
        found = self.means(labels, [mode], baseline)
        return compare.mean_text(found[mode]) if found else NOT_MEASURED

    def verdicts_text(self, labels: Iterable[str], mode: str, baseline: str) -> str:
        """Count the workloads in which the mode is faster, the same, slower or undecided."""
        counts = self.ratios.verdicts(labels, mode, baseline) if self.ratios is not None else {}
        return ", ".join(f"{word} {counts[one]}" for one, word in _VERDICTS.items() if counts.get(one)) or NOT_MEASURED

    def extreme_text(self, labels: Iterable[str], mode: str, baseline: str, *, largest: bool = True) -> str:
        """Write the largest (or smallest) gain and its workload."""
        gains = self.gains(labels, mode, baseline)
        if not gains:
            return NOT_MEASURED
        label = (max if largest else min)(gains, key=gains.__getitem__)
        return f"{gains[label]:.2f} ({label})"

    def provenance(self, labels: Iterable[str] | None = None) -> Provenance:
        """Return the provenance of the run, or of these rows of it."""
        if self.run is None:
            return NOTHING
        whole = provenance.of_run(self.run)
        return whole if labels is None else whole.among(labels)


@dataclass(frozen=True, slots=True)
class Point:
    """Hold one result of an exhibit: a quantity as published and as measured."""

    quantity: str
    published: str | float | int | None
    measured: str | None = NOT_MEASURED


@dataclass(frozen=True, slots=True)
class Made:
    """Hold an exhibit: its table, its figure if there is one, and its provenance."""

    table: Table
    chart: Chart | LineChart | None
    provenance: Provenance
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Exhibit:
    """Describe a figure or table of a paper that this suite reproduces.

    Attributes:
        name: its name for `encore report --only`: "fig10", "pygraph-table2".
        source: key of the paper in `results/published.json`.
        number: its number in the paper: "Fig. 10".
        shows: its description in one line.
        differs: differences from the paper's measurements, beyond GPU and versions.
        content: returns the grid of its values, or the whole exhibit where it is no grid.
        needs_runs: False if it is made without any run.
    """

    name: str
    source: str
    number: str
    shows: str
    differs: str
    content: Callable[[Exhibit, Results], Grid | Made]
    needs_runs: bool = True

    @property
    def stem(self) -> str:
        """Return the stem of its files' names, which differ from those of the report's own figures."""
        return f"paper_{self.name.replace('-', '_')}"

    def title(self, published: Published) -> str:
        return f"{published.sources[self.source].label} {self.number}: {self.shows}"

    def labels(self, results: Results) -> tuple[str, ...]:
        """Return the paper's workloads in this suite's order, measured or not."""
        return tuple(sorted(results.published.workloads[self.source]))

    def headline(self, results: Results) -> Mapping[str, int | float | str]:
        """Return the numbers that the paper's text gives."""
        return results.published.headline[self.source]

    def make(self, results: Results) -> Made:
        """Make table and figure."""
        content = self.content(self, results)
        return content if isinstance(content, Made) else _of_grid(self, results, content)

    def whole(
        self,
        results: Results,
        rows: Sequence[Row],
        points: Sequence[Point],
        chart: Chart | LineChart | None = None,
        summary: Iterable[Row] = (),
        columns: Iterable[str] = (),
        origin: Provenance | None = None,
        more: str = "",
    ) -> Made:
        """Return the exhibit with a table of these rows. Its note describes differences from the paper, and `more`."""
        here = origin or results.provenance()
        note = f"Measured: {here.device}, PyTorch {here.torch}. " if here is not NOTHING else ""
        note += f"Published: {results.published.sources[self.source].setting}. {self.differs}"
        rows = rows or [{"missing": NOT_MEASURED}]
        table = make_table(
            self.stem, self.title(results.published), f"{note} {more}" if more else note, rows, summary, columns
        )
        return Made(table, chart if chart is not None and chart.has_values else None, here, points)


def plain_mean(values: Sequence[float]) -> Ratio:
    """Return the geometric mean of positive numbers that have no interval."""
    value = math.exp(math.fsum(map(math.log, values)) / len(values))
    return Ratio(value, math.nan, math.nan, count=len(values))


@dataclass(frozen=True, slots=True)
class Series:
    """Describe one bar of each group and one column of the table.

    Attributes:
        name: label of the bars; a mode has its colour.
        measure: returns the value of a workload.
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
    """Hold values by workload and series: the table and the figure of an exhibit are made of the same ones.

    Attributes:
        unit: suffix of the table's columns: "speedup", "percent", "bytes", "ratio".
        axis, scale, shown: of the figure.
        points: its results.
        published: description of the marked values, before their source.
        more: further columns of a row.
        note: remarks on the figure, and with `noted` on the table.
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
    noted: bool = False
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


def ratio_series(results: Results, source: str, mode: str, baseline: str, **changes: object) -> Series:
    """Return the speed-up of a mode over another, with the paper's ratio of the corresponding modes."""
    series = Series(
        mode,
        lambda label: results.ratio(label, mode, baseline),
        lambda label: results.published_ratio(source, label, mode, baseline),
    )
    return replace(series, **changes)  # type: ignore[arg-type]


def known(value: float | None, why: str | None) -> Bar:
    """Return a number without an interval, or the reason that there is none."""
    return Bar(failure=why or NOT_MEASURED) if value is None else Bar(value)


def count_note(means: Mapping[str, Ratio]) -> str:
    """Describe the whiskers and means of a figure for its caption."""
    return f"{WHISKERS} Geomean: the {_count(means)} workloads that all modes have." if means else ""


def _count(means: Mapping[str, Ratio]) -> int:
    return max((mean.count for mean in means.values()), default=0)


def _of_grid(exhibit: Exhibit, results: Results, grid: Grid) -> Made:
    """Make the exhibit: its table, and its figure if a drawn series has any number."""
    drawn = tuple(series for series in grid.series if series.drawn)
    bars: dict[tuple[str, str], Bar] = {}
    rows: list[Row] = []
    for label in grid.labels:
        row: dict[str, object] = {grid.group: label}
        whys: dict[str, str | None] = {}
        for series in grid.series:
            bar = replace(series.measure(label), published=series.published(label) if series.published else None)
            if series.drawn:
                bars[label, series.name] = _drawn(series, bar)
            if series.listed:
                row |= series.columns(grid.unit, bar)
                whys[series.column or series.name] = bar.failure
        rows.append({**row, **grid.more(label), "missing": reasons(whys)})
    ends: dict[str, object] = {grid.group: f"geomean of {_count(grid.means)}"}
    for series in grid.series:
        if (mean := grid.means.get(series.name)) is None:
            continue
        bar = Bar(mean.value, mean.interval() if math.isfinite(mean.low) else None, label=f"{mean.value:.2f}")
        if series.drawn:
            bars[GEOMEAN, series.name] = bar
        if series.listed:
            ends |= series.columns(grid.unit, bar, printed=False)
    chart = Chart(
        exhibit.stem,
        exhibit.title(results.published),
        grid.axis,
        grid.scale,
        (*grid.labels, *([GEOMEAN] if grid.means else [])),
        tuple(series.name for series in drawn),
        bars,
        summary_groups=1 if grid.means else 0,
        published=f"{grid.published}{results.published.sources[exhibit.source].setting}",
        note=grid.note,
        shown=grid.shown,
    )
    summary = [*([ends] if grid.means else []), *grid.footer]
    origin = grid.origin or results.provenance(grid.labels)
    return exhibit.whole(
        results, rows, grid.points, chart, summary, origin=origin, more=grid.note if grid.noted else ""
    )


def reasons(found: Mapping[str, str | None]) -> str | None:
    """Return the modes without a number, with reasons: "indirection: fail_accuracy"; equal reasons only once."""
    if not (lacking := {mode: why for mode, why in found.items() if why}):
        return None
    if len(lacking) == len(found) and len(set(lacking.values())) == 1:
        return next(iter(lacking.values()))
    return "; ".join(f"{mode}: {why}" for mode, why in lacking.items())


def _drawn(series: Series, bar: Bar) -> Bar:
    if bar.value is None:
        why = bar.failure or NOT_MEASURED
        return Bar(failure=NOT_MEASURED if why.endswith(NOT_MEASURED) else why, published=bar.published)
    interval = bar.interval if bar.interval and all(map(math.isfinite, bar.interval)) else None
    return replace(bar, interval=interval, failure=None, label=bar.label or series.text(bar.value) or None)
