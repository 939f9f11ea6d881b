"""What a figure or table of a paper is here: how it is named, what differs, and how it is made from results alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from suite import stats
from suite.micro.records import MicroRun
from suite.modes import DEFAULT_MODE, INDIRECTION_MODE, REFERENCE_MODE, UNPARTITIONED_MODE
from suite.nanogpt.records import NanoGptRun
from suite.report import compare, provenance
from suite.report.chart import Bar, Chart
from suite.report.compare import COMPARABLE, Comparison, Kernels, TimeKind
from suite.report.line_chart import LineChart
from suite.report.load import Run
from suite.report.provenance import Provenance
from suite.report.published import Published
from suite.report.table import Table
from suite.schema import Cell, Environment, Status
from suite.stats import Verdict

NOT_MEASURED = "not measured"
VOID = "other kernels"
NOTHING = Provenance("no run was given", "nothing measured", None, "none", None)
"""Of what rests on no result at all."""


@dataclass(frozen=True)
class Results:
    """Everything exhibits are made of. Whatever was not given is missing, and is marked so."""

    published: Published
    run: Run | None = None
    micro: MicroRun | None = None
    nanogpt: NanoGptRun | None = None
    _known: dict[tuple[str, str, str], Comparison | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def whole_mode(self) -> str:
        """The mode next to a paper's whole system; until a run has the default mode, `indirection`."""
        return DEFAULT_MODE if self.run is not None and DEFAULT_MODE in self.run.modes else INDIRECTION_MODE

    def cell(self, label: str, mode: str) -> Cell | None:
        """The cell of this row in this mode, passed or not."""
        return self.run.find(label, mode) if self.run is not None else None

    def passed(self, label: str, mode: str) -> Cell | None:
        """The cell, if it passed."""
        cell = self.cell(label, mode)
        return cell if cell is not None and cell.status is Status.PASS else None

    def state(self, label: str, mode: str) -> str | None:
        """Why this row has no number in this mode; None where it has passed."""
        cell = self.cell(label, mode)
        if cell is None:
            return NOT_MEASURED
        return None if cell.status is Status.PASS else cell.status.value

    def against(self, label: str, mode: str, baseline: str = REFERENCE_MODE) -> Comparison | None:
        """A mode against another by host time; None where the mode was not run."""
        key = (label, mode, baseline)
        if key not in self._known:
            cell = self.cell(label, mode)
            made = cell and self.run and compare.against(self.run, cell, baseline, TimeKind.LATENCY)
            self._known[key] = made or None
        return self._known[key]

    def ratio(self, label: str, mode: str, baseline: str = REFERENCE_MODE) -> stats.Ratio | None:
        """How many times faster than the baseline, where both ran and did not run other kernels."""
        item = self.against(label, mode, baseline)
        return None if item is None or item.kernels is Kernels.OTHER else item.ratio

    def gain(self, label: str, mode: str, baseline: str = REFERENCE_MODE) -> stats.Ratio | None:
        """The ratio where it is one of modes: both sides ran the same kernels. Only such ratios are in means."""
        item = self.against(label, mode, baseline)
        return item.ratio if item is not None and item.is_gain else None

    def why_no_ratio(self, label: str, mode: str, baseline: str = REFERENCE_MODE) -> str | None:
        """The reason where `ratio` is None, or one of tuned kernels and not of modes alone: it is in no mean then."""
        item = self.against(label, mode, baseline)
        if item is None:
            return NOT_MEASURED
        if item.ratio is None:
            return item.missing
        if item.kernels is None or item.kernels in COMPARABLE:
            return None
        return VOID if item.kernels is Kernels.OTHER else item.kernels.value

    def bar(self, label: str, mode: str, baseline: str = REFERENCE_MODE, paper: float | None = None) -> Bar:
        """The ratio as a bar with its interval and value, or the reason in its place."""
        ratio, item = self.ratio(label, mode, baseline), self.against(label, mode, baseline)
        if ratio is None or item is None:
            return Bar(failure=self.why_no_ratio(label, mode, baseline) or NOT_MEASURED, published=paper)
        interval = (ratio.low, ratio.high) if math.isfinite(ratio.high) else None
        undecided = item.verdict in (Verdict.AMBG, None)
        return Bar(ratio.value, interval, published=paper, undecided=undecided, label=f"{ratio.value:.2f}")

    def published_ratio(self, source: str, label: str, mode: str, baseline: str) -> float | None:
        """The paper's ratio of two modes' counterparts: its CUDA graphs are `graph`, its whole system `encore`."""
        names = {UNPARTITIONED_MODE: "graph", self.whole_mode: "encore"}
        printed = self.published.printed(source, label)
        key = f"{names.get(mode, mode)}_over_{names.get(baseline, baseline)}"
        return self.published.speedups.get(source, {}).get(printed, {}).get(key)

    def provenance(self) -> Provenance:
        """Of what rests on the run."""
        if self.run is None:
            return NOTHING
        return provenance.of_run(self.run)


@dataclass(frozen=True, slots=True)
class Made:
    """An exhibit made: its table always, its figure where there is one to draw, and where its numbers are from."""

    table: Table
    chart: Chart | LineChart | None
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A figure or table of a paper, as this suite can make it.

    Attributes:
        name: how `encore report --only` calls it: "fig10", "pygraph-table2".
        source: key of the paper in `results/published.json`.
        number: what the paper calls it: "Fig. 10".
        shows: what it shows, in one line.
        differs: what is measured otherwise than in the paper, beyond GPU and versions.
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
        """Name of its files: those of the papers are apart from the report's own."""
        return f"paper_{self.name.replace('-', '_')}"

    def title(self, published: Published) -> str:
        return f"{published.sources[self.source].label} {self.number}: {self.shows}"

    def note(self, results: Results) -> str:
        """The line on what differs: machine and versions of both sides, then the way of measuring."""
        paper = results.published.sources[self.source].setting
        here = results.provenance()
        measured = f"Measured: {here.device}, PyTorch {here.torch}. " if results.run is not None else ""
        return f"{measured}Published: {paper}. {self.differs}"


def of_environment(environment: Environment, smoke: str | None = None) -> Provenance:
    """Provenance of results that are not a run of the suite; `smoke` says why they say nothing about performance."""
    device = environment.gpu.name if environment.gpu else f"CPU {environment.cpu.model}"
    commit = provenance.short_commit(environment) or "unknown"
    warning = f"SMOKE RUN {smoke}: these numbers say nothing about performance" if smoke else None
    return Provenance(f"run {environment.run_id}", device, commit, environment.torch, warning, environment.driver)


def labels_of(results: Results, source: str) -> tuple[str, ...]:
    """The paper's workloads in this suite's order, measured or not."""
    return tuple(sorted(results.published.workloads[source]))


def common_means(
    results: Results, labels: Iterable[str], series: Sequence[tuple[str, str]]
) -> tuple[dict[tuple[str, str], stats.GeometricMean], int]:
    """Geometric means of each (mode, baseline) over the workloads where all of those with any gain have one.

    A ratio whose sides ran other kernels is no gain.

    Returns:
        The means, and over how many workloads they go.
    """
    gains: dict[tuple[str, str], dict[str, stats.Ratio]] = {}
    for mode, baseline in series:
        for label in labels:
            if (gain := results.gain(label, mode, baseline)) is not None:
                gains.setdefault((mode, baseline), {})[label] = gain
    common = sorted(set.intersection(*(set(own) for own in gains.values()))) if gains else []
    if not common:
        return {}, 0
    return {key: stats.geometric_mean([own[label] for label in common]) for key, own in gains.items()}, len(common)


def chart_or_none(chart: Chart) -> Chart | None:
    """The figure if it has a measured value; the published ones alone are in the table."""
    return chart if any(bar.value is not None for bar in chart.bars.values()) else None


def reasons(found: Mapping[str, str | None]) -> str | None:
    """Which modes lack a number, and why: "indirection: fail_accuracy"; of equal reasons only one."""
    if not (lacking := {mode: why for mode, why in found.items() if why}):
        return None
    if len(lacking) == len(found) and len(set(lacking.values())) == 1:
        return next(iter(lacking.values()))
    return "; ".join(f"{mode}: {why}" for mode, why in lacking.items())
