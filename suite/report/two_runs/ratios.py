"""Ratios of modes over baselines of the same run, for two runs or for two modes of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from suite.measure.modes import EAGER_MODE, GRAPH_MODE, REFERENCE_MODE
from suite.report.compare import (
    Kernels,
    TimeKind,
    baselines,
    compare_kernels,
    has_settled,
    ratios_by_process,
    spread_of,
)
from suite.report.load import Run, cell_label
from suite.report.two_runs.change import Change, LogRatios, change_between, change_within, own_variance
from suite.results import stats
from suite.results.schema import Cell, Status

BASELINES = (GRAPH_MODE, REFERENCE_MODE, EAGER_MODE)
"""In-run baselines, the best first: `graph` depends least on the host."""
ONE_PROCESS = "one process in each run, and nothing tells how much processes differ"
NOT_SETTLED = "not settled when it was timed"
OTHER_KERNELS = "other kernels than"
_VOID = (Kernels.RETUNED, Kernels.OTHER)


@dataclass(frozen=True, slots=True)
class Found:
    """A change with what it was made from: the baseline and the ratios over it in BASE and in NEW.

    `reason` says why there is no change. Two modes of one run have no baseline: one is compared with the other.
    """

    change: Change | None
    baseline: str | None = None
    ratios: tuple[float, ...] = ()
    reason: str | None = None


class WithinRuns:
    """Log ratios of all rows of two runs over baselines of the own run, each computed once."""

    def __init__(self, base: Run, new: Run, metric: TimeKind, *, same_run: bool) -> None:
        self._rows = [{(cell_label(cell), cell.mode): cell for cell in run.cells} for run in (base, new)]
        self._metric, self._same_run = metric, same_run
        self._ratios: dict[tuple[int, str, str, str], LogRatios | str] = {}
        self._spreads: dict[str, stats.Spread] = {}

    def change(self, label: str, base_mode: str, new_mode: str) -> Found:
        """Return the change of a row from a mode in BASE to a mode in NEW.

        Raises:
            EncoreError: a recorded time is not positive.
        """
        return self._same(label, base_mode, new_mode) if self._same_run else self._apart(label, base_mode, new_mode)

    def _same(self, label: str, base_mode: str, new_mode: str) -> Found:
        """Compare two modes of one run. A mode that ran again as the other's baseline has these blocks in its row."""
        row = self._rows[0].get((label, base_mode))
        back = row is not None and new_mode in row.baseline_blocks
        found = self._of_run(0, label, *((base_mode, new_mode) if back else (new_mode, base_mode)))
        if isinstance(found, str):
            return Found(None, reason=found)
        change = change_within(-found if back else found, self._spread(label))
        return Found(change, reason=None if change else ONE_PROCESS)

    def _apart(self, label: str, base_mode: str, new_mode: str) -> Found:
        """Compare over the first baseline that both runs have."""
        whys = []
        for baseline in BASELINES[BASELINES.index(base_mode) + 1 :] if base_mode in BASELINES else BASELINES:
            if baseline == new_mode:
                continue
            base, new = self._of_run(0, label, base_mode, baseline), self._of_run(1, label, new_mode, baseline)
            if isinstance(base, str) or isinstance(new, str):
                named = {name: side for side, name in ((base, "BASE"), (new, "NEW")) if isinstance(side, str)}
                whys += (
                    [f"{base} in both"]
                    if len(named) == 2 and len(set(named.values())) == 1
                    else [f"{why} in {name}" for name, why in named.items()]
                )
                continue
            change = change_between(base, new, self._spread(label))
            ratios = (math.exp(base.mean()), math.exp(new.mean()))
            return Found(change, baseline, ratios, None if change else ONE_PROCESS)
        return Found(None, reason="; ".join(dict.fromkeys(whys)) or "other modes are compared with it")

    def _of_run(self, side: int, label: str, mode: str, baseline: str) -> LogRatios | str:
        """Return the log ratios of the processes of one run, or why there are none."""
        key = (side, label, mode, baseline)
        if key not in self._ratios:
            cell, reference = self._rows[side].get((label, mode)), self._rows[side].get((label, baseline))
            self._ratios[key] = self._found(cell, reference, baseline)
        return self._ratios[key]

    def _found(self, cell: Cell | None, reference: Cell | None, baseline: str) -> LogRatios | str:
        if cell is None or reference is None:
            return f"{baseline} was not measured"
        if not cell.status is reference.status is Status.PASS:
            return f"{baseline}: {reference.status.value}"
        if not (has_settled(cell) and has_settled(reference)):
            return NOT_SETTLED
        ratios = ratios_by_process(cell, reference, self._metric)
        if ratios is None:
            return f"no {self._metric.value} samples"
        if compare_kernels(cell, reference, math.exp(ratios.mean())) in _VOID:
            return f"{OTHER_KERNELS} {baseline}"
        return ratios

    def _spread(self, label: str) -> stats.Spread:
        """Return what all ratios of a workload tell of how much processes differ: see Note [Both intervals]."""
        if label not in self._spreads:
            row = [cell for (name, _), cell in self._rows[0].items() if name == label]
            self._spreads[label] = spread_of(row, self._metric) if self._same_run else self._spread_of_both(label, row)
        return self._spreads[label]

    def _spread_of_both(self, label: str, row: Sequence[Cell]) -> stats.Spread:
        variances, modes = [], set()
        for cell in row:
            for baseline in baselines(cell):
                found = [self._of_run(side, label, cell.mode, baseline) for side in (0, 1)]
                sides = [side for side in found if not isinstance(side, str)]
                if len(sides) == 2 and sum(map(len, sides)) > 2:
                    variances.append(own_variance(*sides))
                    modes |= {cell.mode, baseline}
        return stats.spread_of_variances(variances, len(modes))
