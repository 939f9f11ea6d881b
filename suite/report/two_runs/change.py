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
from collections.abc import Sequence

from suite.measure.modes import EAGER_MODE, GRAPH_MODE, REFERENCE_MODE
from suite.report.compare import Kernels, Ratios, baselines, ratios_by_process
from suite.results import stats
from suite.results.schema import Cell
from suite.results.stats import LogRatios, Ratio

BASELINES = (GRAPH_MODE, REFERENCE_MODE, EAGER_MODE)
"""In-run baselines, the best first: `graph` depends least on the host."""
ONE_PROCESS = "one process in each run, and nothing tells how much processes differ"
NOT_SETTLED = "not settled when it was timed"
OTHER_KERNELS = "other kernels than"


class WithinRuns:
    """Hold log ratios of all rows of two runs over baselines of the same run, each computed once."""

    def __init__(self, base: Sequence[Cell], new: Sequence[Cell]) -> None:
        self._runs = (Ratios(base), Ratios(new))
        self._of_run = functools.cache(self._ratios_of_run)
        self._spread = functools.cache(self._spread_of_both)

    def change(self, label: str, mode: str) -> tuple[Ratio | None, str | None, tuple[float, ...], str | None]:
        """Return the change of a row in this mode, its baseline, the ratios over it, and why there is no change.

        The baseline is the first one that both runs have.
        """
        whys = []
        for baseline in BASELINES[BASELINES.index(mode) + 1 :] if mode in BASELINES else BASELINES:
            base, new = self._of_run(0, label, mode, baseline), self._of_run(1, label, mode, baseline)
            if not isinstance(base, str) and not isinstance(new, str):
                change = stats.ratio_of_processes(float(new.mean() - base.mean()), [base, new], self._spread(label))
                ratios = (math.exp(base.mean()), math.exp(new.mean()))
                return change, baseline, ratios, None if change else ONE_PROCESS
            if isinstance(base, str) and isinstance(new, str) and base == new:
                whys.append(f"{base} in both")
            else:
                whys += [f"{why} in {name}" for why, name in ((base, "BASE"), (new, "NEW")) if isinstance(why, str)]
        return None, None, (), "; ".join(dict.fromkeys(whys)) or "other modes are compared with it"

    def _ratios_of_run(self, side: int, label: str, mode: str, baseline: str) -> LogRatios | str:
        """Return the log ratios of the processes of one run, or the reason why there are none."""
        run = self._runs[side]
        item, reference = run.find(label, mode, baseline), run.cell(label, baseline)
        if item is None or reference is None:
            return f"{baseline}: not run"
        if item.missing is not None:
            return item.missing
        if not item.settled:
            return NOT_SETTLED
        if item.kernels is Kernels.RETUNED:
            return f"{OTHER_KERNELS} {baseline}"
        found = ratios_by_process(item.cell, reference)
        assert found is not None, "a ratio has samples"
        return found

    def _spread_of_both(self, label: str) -> stats.Spread:
        """Estimate the variance between processes from all ratios of a workload: see Note [Both intervals]."""
        pairs, modes = [], set()
        for cell in self._runs[0].row(label):
            for baseline in baselines(cell):
                found = [self._of_run(side, label, cell.mode, baseline) for side in (0, 1)]
                sides = [side for side in found if not isinstance(side, str)]
                if len(sides) == 2 and sum(map(len, sides)) > 2:
                    pairs.append(sides)
                    modes |= {cell.mode, baseline}
        return stats.spread_of(pairs, len(modes))
