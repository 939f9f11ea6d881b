"""Describe figures and tables of papers: names, differences, and how to make them from results alone.

Most exhibits are a grid (`suite.report.grid`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from suite.measure.modes import REFERENCE_MODE
from suite.micro.records import MicroRun
from suite.report import compare, provenance
from suite.report.chart import Bar, Chart, LineChart
from suite.report.compare import Ratios
from suite.report.grid import NOT_MEASURED, Grid, Point, Series
from suite.report.provenance import Provenance
from suite.report.published import Published
from suite.report.runs import Run
from suite.report.table import Row, Table, make_table
from suite.results.schema import Cell, Status
from suite.results.stats import Ratio, Verdict

NOT_HELD = "not known here"
"""The mark of values that a paper prints and `results/published.json` lacks."""
NOTHING = Provenance("nothing measured", "none")
"""Provenance of values that do not depend on results."""


@dataclass(frozen=True)
class Results:
    """Hold the input of all exhibits. Missing parts are marked as missing."""

    published: Published
    run: Run | None = None
    micro: MicroRun | None = None
    nanogpt: Run | None = None
    """Rows of nanoGPT before it became workloads of the suite; `run` has newer ones."""
    programs: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """Peak memory of small programs over stock's, by GPU and phase: `costs.read_programs`."""
    proved: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Chains against branches by workload: `speedups.read_proof`."""

    @cached_property
    def ratios(self) -> Ratios:
        """Return the ratios of the run, none without a run."""
        return Ratios(self.run.cells if self.run is not None else ())

    def passed(self, label: str, mode: str) -> Cell | None:
        """Return the cell of this row in this mode, if it passed."""
        cell = self.ratios.cell(label, mode)
        return cell if cell is not None and cell.status is Status.PASS else None

    def state(self, label: str, *modes: str) -> str | None:
        """Return the reason why this row has no number in one of these modes; None if it passed in all."""
        for mode in modes:
            cell = self.ratios.cell(label, mode)
            if cell is None or cell.status is not Status.PASS:
                return NOT_MEASURED if cell is None else cell.status.value
        return None

    def metric(self, label: str, mode: str, path: str) -> Any:
        """Return the metric of this row at a path of fields; None if it was not measured, or the cell failed."""
        cell = self.passed(label, mode)
        return None if cell is None else cell.at(f"metrics.{path}")

    def ratio(self, label: str, mode: str, baseline: str = REFERENCE_MODE) -> Bar:
        """Return the speed-up of the mode over the baseline by host time.

        A ratio with different kernels, or of a mode that had not settled, has `failure` set too: means leave it out.
        """
        item = self.ratios.find(label, mode, baseline)
        if item is None or item.ratio is None:
            return Bar(failure=(item and item.missing) or NOT_MEASURED)
        why = None if item.is_gain else item.mark
        undecided = item.verdict in (Verdict.AMBG, None)
        return Bar(item.ratio.value, item.ratio.interval(), failure=why, undecided=undecided)

    def gains(self, labels: Iterable[str], mode: str, baseline: str = REFERENCE_MODE) -> dict[str, float]:
        """Return the ratios of these rows that compare settled modes with the same kernels."""
        found = {label: self.ratios.gain(label, mode, baseline) for label in labels}
        return {label: gain.value for label, gain in found.items() if gain is not None}

    def means(self, labels: Iterable[str], modes: Sequence[str], baseline: str) -> dict[str, Ratio]:
        """Return the means of these modes over the workloads that all of them have; see `Ratios.means`."""
        found = self.ratios.means(labels, [(mode, baseline) for mode in modes])
        return {mode: mean for (mode, _), mean in found.items()}

    def mean_text(self, labels: Iterable[str], mode: str, baseline: str) -> str:
        """Write the geometric mean over these workloads with interval and count, or "not measured"."""
        mean = self.ratios.mean(labels, mode, baseline)
        return compare.mean_text(mean) if mean is not None else NOT_MEASURED

    def verdicts_text(self, labels: Iterable[str], mode: str, baseline: str) -> str:
        """Count the workloads in which the mode is faster, the same, slower or undecided."""
        counts = self.ratios.verdicts(labels, mode, baseline)
        return (
            ", ".join(f"{word} {counts[one]}" for one, word in compare.VERDICT_WORDS.items() if counts[one])
            or NOT_MEASURED
        )

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
        grid = self.content(self, results)
        if isinstance(grid, Made):
            return grid
        chart = grid.chart(self.stem, self.title(results.published), results.published.sources[self.source].setting)
        rows, summary = grid.rows()
        origin = grid.origin or results.provenance(grid.labels)
        return self.whole(results, rows, grid.points, chart, summary, origin=origin)

    def whole(
        self,
        results: Results,
        rows: Sequence[Row],
        points: Sequence[Point],
        chart: Chart | LineChart | None = None,
        summary: Iterable[Row] = (),
        columns: Iterable[str] = (),
        origin: Provenance | None = None,
    ) -> Made:
        """Return the exhibit with a table of these rows.

        Its note describes differences from the paper, and has the chart's remarks.
        """
        here = origin or results.provenance()
        note = f"Measured: {here.device}, PyTorch {here.torch}. " if here is not NOTHING else ""
        note += f"Published: {results.published.sources[self.source].setting}. {self.differs}"
        note += f" {chart.note}" if chart is not None and chart.note else ""
        rows = rows or [{"missing": NOT_MEASURED}]
        table = make_table(self.stem, self.title(results.published), note, rows, summary, columns)
        return Made(table, chart if chart is not None and chart.has_values else None, here, points)


def ratio_series(results: Results, source: str, mode: str, baseline: str, **changes: object) -> Series:
    """Return the speed-up of a mode over another, with the paper's ratio of the corresponding modes."""
    series = Series(
        mode,
        lambda label: results.ratio(label, mode, baseline),
        lambda label: results.published.speedup(source, label, mode, baseline),
    )
    return replace(series, **changes)  # type: ignore[arg-type]
