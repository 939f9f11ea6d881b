"""Estimate the change of a ratio between two runs, with its interval.

Note [Difference in differences]: two runs were never alive together, so their times also differ by hosts, clocks and
other load. So the compared values are ratios of a mode over a baseline of the same run, whose blocks alternated with
it. Effects on a whole run cancel.

Note [Both intervals]: processes of one program differ, and every process gives one log ratio. The change is the
difference of the two means, and its variance is that of one process times (1 / processes of BASE + 1 / processes of
NEW). The variance of one process is pooled over both runs and over all ratios of a workload, as within a run (Note
[Processes] in `suite.results.stats`), and is never smaller than the ratio's own. So two processes on one side and one
on the other are enough for an interval, and one on each side is not.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from suite.measure.modes import EAGER_MODE, GRAPH_MODE, REFERENCE_MODE
from suite.report.compare import (
    Kernels,
    TimeKind,
    baselines,
    compare_kernels,
    has_settled,
    ratios_by_process,
)
from suite.report.runs import Run, cell_label
from suite.results import stats
from suite.results.schema import Status
from suite.results.stats import LogRatios, Ratio

BASELINES = (GRAPH_MODE, REFERENCE_MODE, EAGER_MODE)
"""In-run baselines, the best first: `graph` depends least on the host."""
ONE_PROCESS = "one process in each run, and nothing tells how much processes differ"
NOT_SETTLED = "not settled when it was timed"
OTHER_KERNELS = "other kernels than"


@dataclass(frozen=True, slots=True)
class Found:
    """Hold a change with its baseline and the ratios over it in BASE and in NEW.

    `reason` is set if there is no change.
    """

    change: Ratio | None
    baseline: str | None = None
    ratios: tuple[float, ...] = ()
    reason: str | None = None


class WithinRuns:
    """Hold log ratios of all rows of two runs over baselines of the same run, each computed once."""

    def __init__(self, base: Run, new: Run, metric: TimeKind) -> None:
        self._rows = [{(cell_label(cell), cell.mode): cell for cell in run.cells} for run in (base, new)]
        self.metric = metric
        self._of_run = functools.cache(self._ratios_of_run)
        self._spread = functools.cache(self._spread_of_both)

    def change(self, label: str, mode: str) -> Found:
        """Return the change of a row in this mode, over the first baseline that both runs have.

        Raises:
            EncoreError: a recorded time is not positive.
        """
        whys = []
        for baseline in BASELINES[BASELINES.index(mode) + 1 :] if mode in BASELINES else BASELINES:
            base, new = self._of_run(0, label, mode, baseline), self._of_run(1, label, mode, baseline)
            if isinstance(base, str) or isinstance(new, str):
                named = {name: side for side, name in ((base, "BASE"), (new, "NEW")) if isinstance(side, str)}
                whys += (
                    [f"{base} in both"]
                    if len(named) == 2 and len(set(named.values())) == 1
                    else [f"{why} in {name}" for name, why in named.items()]
                )
                continue
            change = stats.ratio_of_processes(float(new.mean() - base.mean()), [base, new], self._spread(label))
            ratios = (math.exp(base.mean()), math.exp(new.mean()))
            return Found(change, baseline, ratios, None if change else ONE_PROCESS)
        return Found(None, reason="; ".join(dict.fromkeys(whys)) or "other modes are compared with it")

    def _ratios_of_run(self, side: int, label: str, mode: str, baseline: str) -> LogRatios | str:
        """Return the log ratios of the processes of one run, or the reason why there are none."""
        cell, reference = self._rows[side].get((label, mode)), self._rows[side].get((label, baseline))
        if cell is None or reference is None:
            return f"{baseline} was not measured"
        if not cell.status is reference.status is Status.PASS:
            return f"{baseline}: {reference.status.value}"
        if not (has_settled(cell) and has_settled(reference)):
            return NOT_SETTLED
        ratios = ratios_by_process(cell, reference, self.metric)
        if ratios is None:
            return f"no {self.metric.value} samples"
        if compare_kernels(cell, reference) is Kernels.RETUNED:
            return f"{OTHER_KERNELS} {baseline}"
        return ratios

    def _spread_of_both(self, label: str) -> stats.Spread:
        """Estimate the variance between processes from all ratios of a workload: see Note [Both intervals]."""
        pairs, modes = [], set()
        for cell in (cell for (name, _), cell in self._rows[0].items() if name == label):
            for baseline in baselines(cell):
                found = [self._of_run(side, label, cell.mode, baseline) for side in (0, 1)]
                sides = [side for side in found if not isinstance(side, str)]
                if len(sides) == 2 and sum(map(len, sides)) > 2:
                    pairs.append(sides)
                    modes |= {cell.mode, baseline}
        return stats.spread_of(pairs, len(modes))
