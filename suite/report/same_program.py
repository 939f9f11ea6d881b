"""The same against the same: what a run finds between modes that are one program, and between processes of one mode.

Every FAST or SLOW between two modes that are the same program is a false finding, so their share among these pairs
tells how far the other verdicts can be trusted. Modes are taken for the same program where one says so of the other
(`suite.measure.modes.Mode.same_as`) and both ran the same kernels in as many graphs and copied as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from suite.measure.modes import MODES
from suite.report.compare import Comparison, Kernels, TimeKind, against
from suite.report.load import Run, cell_label
from suite.report.table import Table, make_table
from suite.results import stats
from suite.results.schema import Cell, Status

METRICS = (TimeKind.LATENCY, TimeKind.DEVICE)


@dataclass(frozen=True, slots=True)
class ProcessPair:
    """Two processes of a cell, numbered from 1: how many times faster the later one was, in host time; None where one
    of them has no sample of that."""

    cell: Cell
    first: int
    second: int
    ratio: stats.Ratio | None

    @property
    def differ(self) -> bool:
        """Whether they differ by more than the margin, as far as their blocks tell."""
        if self.ratio is None:
            return False
        beyond = not 1 / (1 + stats.MARGIN) <= self.ratio.value <= 1 + stats.MARGIN
        return beyond and (self.ratio.low > 1 or self.ratio.high < 1)


def same_program_pairs(run: Run) -> list[Comparison]:
    """Comparisons of passed cells of one row that are the same program, in host and device time.

    Raises:
        EncoreError: a recorded time is not positive.
    """
    passed = {(cell_label(cell), cell.mode): cell for cell in run.cells if cell.status is Status.PASS}
    found = []
    for (label, mode), cell in passed.items():
        for other in MODES[mode].same_as if mode in MODES else ():
            reference = passed.get((label, other))
            if reference is not None and same_work(cell, reference):
                pairs = [against(run, cell, other, metric) for metric in METRICS]
                found += [pair for pair in pairs if pair.kernels is Kernels.SAME]
    return found


def same_work(cell: Cell, other: Cell) -> bool:
    """Whether both launched as much in as many graphs and copied as much."""
    return (
        cell.metrics is not None
        and other.metrics is not None
        and cell.metrics.coverage is not None
        and cell.metrics.coverage == other.metrics.coverage
        and cell.metrics.copies == other.metrics.copies
    )


def process_pairs(run: Run) -> list[ProcessPair]:
    """The first process of each passed cell compared with each of its others. They did not run at the same time."""
    return list(_process_pairs(run))


def _process_pairs(run: Run) -> Iterator[ProcessPair]:
    for cell in run.cells:
        numbers = sorted({block.process for block in cell.blocks}) if cell.status is Status.PASS else []
        for number in numbers[1:]:
            first, second = (
                [block.host_us for block in cell.blocks if block.process == process and block.host_us]
                for process in (numbers[0], number)
            )
            ratio = stats.speed_up([first], [second]) if first and second else None
            yield ProcessPair(cell, numbers[0] + 1, number + 1, ratio)


def false_findings(pairs: list[Comparison]) -> list[Comparison]:
    """Those of the same program that were called faster or slower."""
    return [pair for pair in pairs if pair.verdict in (stats.Verdict.FAST, stats.Verdict.SLOW)]


def same_program(run: Run) -> Table:
    """Both kinds of pairs, with the rate of false findings."""
    modes, processes = same_program_pairs(run), process_pairs(run)
    timed = [pair for pair in processes if pair.ratio is not None]
    wrong, apart = len(false_findings(modes)), sum(pair.differ for pair in timed)
    rate = f" ({100 * wrong / len(modes):.1f} %)" if modes else ""
    undecided = sum(pair.verdict is stats.Verdict.AMBG for pair in modes)
    return make_table(
        "same_program",
        "The same against the same",
        f"False findings: {wrong} of {len(modes)} verdicts{rate} on modes that are the same program (host and device "
        f"time) are FAST or SLOW, {undecided} are AMBG. Of {len(timed)} pairs of processes of one mode, which ran "
        f"one after another, {apart} differ by more than {100 * stats.MARGIN:g} % beyond what their blocks scatter; "
        "that is why verdicts go by several processes.",
        ["workload", "mode", "against", "metric", "ratio", "low", "high", "verdict"],
        [
            *(
                {
                    "workload": cell_label(pair.cell),
                    "mode": pair.cell.mode,
                    "against": pair.baseline,
                    "metric": pair.metric.value,
                    "ratio": pair.ratio.value if pair.ratio else None,
                    "low": pair.ratio.low if pair.ratio else None,
                    "high": pair.ratio.high if pair.ratio else None,
                    "verdict": pair.verdict.value if pair.verdict else None,
                }
                for pair in modes
            ),
            *(
                {
                    "workload": cell_label(pair.cell),
                    "mode": pair.cell.mode,
                    "against": f"process {pair.second} over {pair.first}",
                    "metric": TimeKind.LATENCY.value,
                    "ratio": pair.ratio.value if pair.ratio else None,
                    "low": pair.ratio.low if pair.ratio else None,
                    "high": pair.ratio.high if pair.ratio else None,
                    "verdict": "not measured" if pair.ratio is None else "differ" if pair.differ else None,
                }
                for pair in processes
            ),
        ],
    )
