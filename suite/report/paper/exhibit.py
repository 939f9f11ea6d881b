"""What a figure or table of a paper is here: how it is named, what differs, and how it is made from results alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from suite.measure.modes import DEFAULT_MODE, INDIRECTION_MODE, REFERENCE_MODE, UNPARTITIONED_MODE
from suite.micro.records import MicroRun
from suite.nanogpt.records import NanoGptRun
from suite.report import compare, provenance
from suite.report.chart import Chart, LineChart
from suite.report.compare import COMPARABLE, Comparison, Kernels, TimeKind
from suite.report.load import Run
from suite.report.provenance import Provenance
from suite.report.published import Published
from suite.report.table import Table
from suite.results import stats
from suite.results.schema import Cell, Environment, Status
from suite.results.stats import Verdict

NOT_MEASURED = "not measured"
NOT_HELD = "not in results/published.json"
"""Of values that a paper prints and the file of published values lacks."""
VOID = "other kernels"
NOTHING = Provenance("no run was given", "nothing measured", None, "none", None, count=0)
"""Of what rests on no result at all."""
_VERDICTS = {
    Verdict.FAST: "faster",
    Verdict.SAME: "the same",
    Verdict.SLOW: "slower",
    Verdict.AMBG: "undecided",
    None: "without a verdict",
}


@dataclass(frozen=True)
class Results:
    """Everything exhibits are made of. Whatever was not given is missing, and is marked so."""

    published: Published
    run: Run | None = None
    micro: MicroRun | None = None
    nanogpt: NanoGptRun | None = None
    programs: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """Peak memory of small programs over stock's, by GPU and phase: `costs.read_programs`."""
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
        """The ratio where it is one of modes: same kernels, and settled. Only such ratios are in means."""
        item = self.against(label, mode, baseline)
        return item.ratio if item is not None and item.is_gain else None

    def why_no_ratio(self, label: str, mode: str, baseline: str = REFERENCE_MODE) -> str | None:
        """The reason where `ratio` is None, or where it is in no mean."""
        item = self.against(label, mode, baseline)
        if item is None:
            return NOT_MEASURED
        if item.ratio is None:
            return item.missing
        if item.kernels is not None and item.kernels not in COMPARABLE:
            return VOID if item.kernels is Kernels.OTHER else item.kernels.value
        return None if item.settled else compare.UNSETTLED

    def published_ratio(self, source: str, label: str, mode: str, baseline: str) -> float | None:
        """The paper's ratio of two modes' counterparts: its CUDA graphs are `graph`, its whole system `encore`."""
        names = {UNPARTITIONED_MODE: "graph", self.whole_mode: "encore"}
        printed = self.published.printed(source, label)
        key = f"{names.get(mode, mode)}_over_{names.get(baseline, baseline)}"
        return self.published.speedups.get(source, {}).get(printed, {}).get(key)

    def means(
        self, labels: Iterable[str], series: Sequence[tuple[str, str]]
    ) -> tuple[dict[tuple[str, str], stats.GeometricMean], int]:
        """Geometric means of each (mode, baseline) over the workloads where all of those with any gain have one, and
        over how many workloads they go."""
        gains: dict[tuple[str, str], dict[str, stats.Ratio]] = {}
        for mode, baseline in series:
            for label in labels:
                if (gain := self.gain(label, mode, baseline)) is not None:
                    gains.setdefault((mode, baseline), {})[label] = gain
        common = sorted(set.intersection(*(set(own) for own in gains.values()))) if gains else []
        if not common:
            return {}, 0
        return {key: stats.geometric_mean([own[label] for label in common]) for key, own in gains.items()}, len(common)

    def mean_text(self, labels: Iterable[str], mode: str, baseline: str) -> str:
        """The geometric mean over these workloads with interval and count, or "not measured"."""
        found, count = self.means(labels, [(mode, baseline)])
        return mean_text(found[mode, baseline], count) if found else NOT_MEASURED

    def verdicts_text(self, labels: Iterable[str], mode: str, baseline: str) -> str:
        """Of how many workloads the mode is faster, the same, slower or undecided."""
        items = [item for label in labels if (item := self.against(label, mode, baseline)) and item.ratio is not None]
        counts = Counter(item.verdict for item in items)
        return ", ".join(f"{word} {counts[verdict]}" for verdict, word in _VERDICTS.items() if counts[verdict]) or (
            NOT_MEASURED
        )

    def extreme_text(self, labels: Iterable[str], mode: str, baseline: str, *, largest: bool = True) -> str:
        """The largest (or smallest) gain and its workload."""
        gains = {label: gain.value for label in labels if (gain := self.gain(label, mode, baseline)) is not None}
        if not gains:
            return NOT_MEASURED
        label = (max if largest else min)(gains, key=gains.__getitem__)
        return f"{gains[label]:.2f} ({label})"

    def provenance(self, labels: Iterable[str] | None = None) -> Provenance:
        """Of what rests on the run, or on these rows of it."""
        if self.run is None:
            return NOTHING
        whole = provenance.of_run(self.run)
        return whole if labels is None else whole.among(labels)


@dataclass(frozen=True, slots=True)
class Point:
    """What an exhibit comes to, in one line: a quantity as published and as measured."""

    quantity: str
    published: str | float | int | None
    measured: str | None = NOT_MEASURED


@dataclass(frozen=True, slots=True)
class Made:
    """An exhibit made: its table always, its figure where there is one to draw, and where its numbers are from."""

    table: Table
    chart: Chart | LineChart | None
    provenance: Provenance
    points: tuple[Point, ...] = ()


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

    def note(self, results: Results, origin: Provenance | None = None) -> str:
        """The line on what differs: machine and versions of both sides, then the way of measuring."""
        here = origin or results.provenance()
        measured = f"Measured: {here.device}, PyTorch {here.torch}. " if here is not NOTHING else ""
        return f"{measured}Published: {results.published.sources[self.source].setting}. {self.differs}"


def of_environment(environment: Environment, smoke: str | None = None) -> Provenance:
    """Provenance of results that are not a run of the suite; `smoke` says why they say nothing about performance."""
    device = environment.gpu.name if environment.gpu else f"CPU {environment.cpu.model}"
    commit = provenance.short_commit(environment) or "unknown"
    warning = f"SMOKE RUN {smoke}: these numbers say nothing about performance" if smoke else None
    return Provenance(f"run {environment.run_id}", device, commit, environment.torch, warning, environment.driver)


def labels_of(results: Results, source: str) -> tuple[str, ...]:
    """The paper's workloads in this suite's order, measured or not."""
    return tuple(sorted(results.published.workloads[source]))


def mean_text(mean: stats.GeometricMean, count: int) -> str:
    return f"{mean.value:.2f} [{mean.low:.2f}, {mean.high:.2f}] of {count}"


def geomean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers that have no interval."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def reasons(found: Mapping[str, str | None]) -> str | None:
    """Which modes lack a number, and why: "indirection: fail_accuracy"; of equal reasons only one."""
    if not (lacking := {mode: why for mode, why in found.items() if why}):
        return None
    if len(lacking) == len(found) and len(set(lacking.values())) == 1:
        return next(iter(lacking.values()))
    return "; ".join(f"{mode}: {why}" for mode, why in lacking.items())
