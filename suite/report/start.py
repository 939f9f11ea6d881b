"""Compute the time of a program's start: until it is settled, for its first calls, and until Encore is faster in total.

The first calls are timed one by one with synchronization (`CompileTimes.calls_s`). Later calls are assumed to take the
median of the mode's timed blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from suite.report.cell_tables import compile_conditions, host_median_us
from suite.report.compare import STOCK_MODES, Ratios
from suite.report.runs import cell_label
from suite.report.table import Table, make_table
from suite.results.schema import CALLS_OF_START, Cell

NEVER = "never"


@dataclass(frozen=True, slots=True)
class Start:
    """Hold the seconds of each of a mode's first calls, and of a later call."""

    calls_s: tuple[float, ...]
    steady_s: float

    def sum_s(self, calls: int) -> float:
        """Return the seconds of so many calls from the first on."""
        return sum(self.calls_s[:calls]) + max(0, calls - len(self.calls_s)) * self.steady_s

    def pays_after(self, other: Start) -> int | None:
        """Return the call after which the total time stays at most the other's; None if there is none."""
        measured = max(len(self.calls_s), len(other.calls_s))
        last_above = max((n for n in range(1, measured + 1) if self.sum_s(n) > other.sum_s(n)), default=0)
        if last_above < measured and self.steady_s <= other.steady_s:
            return last_above + 1
        if self.steady_s >= other.steady_s:
            return None
        lag_s = self.sum_s(measured) - other.sum_s(measured)
        return measured + max(1, math.ceil(round(lag_s / (other.steady_s - self.steady_s), 6)))


def start_of(cell: Cell) -> Start | None:
    """Return the measurements of a cell's start; None if calls were not timed one by one."""
    steady_us = host_median_us(cell)
    if cell.compile is None or not cell.compile.calls_s or steady_us is None:
        return None
    return Start(cell.compile.calls_s, steady_us / 1e6)


def start_table(ratios: Ratios) -> Table:
    """Make the table of starts: a row for each cell whose first calls were noted."""
    return make_table(
        "start",
        "Start: what a program's first calls take",
        "settled after: calls and seconds of warm-up and settling; those of the accuracy check are left out. first "
        f"calls: the first {CALLS_OF_START} with compilation, later ones at the steady time, and how many "
        "times as long as in another mode. pays after: from which call on all calls so far took no longer than in that "
        "mode; never: a call is slower in the steady state too. compiled: what was cached then.",
        _rows(ratios),
    )


def _rows(ratios: Ratios) -> Iterator[dict[str, object]]:
    for cell in ratios.cells:
        start, times = start_of(cell), cell.compile
        if start is None or times is None:
            continue
        settled = times.settled and times.warm_up_calls is not None
        row: dict[str, object] = {
            "workload": cell_label(cell),
            "mode": cell.mode,
            "settled_after_calls": (times.warm_up_calls or 0) + (times.settle_calls or 0) if settled else None,
            "settled_after_s": times.warm_up_s + (times.settle_s or 0.0) if settled else None,
            "first_calls_s": start.sum_s(CALLS_OF_START),
        }
        for mode in STOCK_MODES:
            other = start_in(mode, cell, ratios)
            ratio = other and start.sum_s(CALLS_OF_START) / other.sum_s(CALLS_OF_START)
            row |= {f"first_calls_over_{mode}_ratio": ratio}
            row |= {f"pays_after_{mode}_calls": other and (start.pays_after(other) or NEVER)}
        yield row | {"compiled": compile_conditions(times)}


def start_in(mode: str, cell: Cell, ratios: Ratios) -> Start | None:
    """Return the start of a cell's program in another mode, if both were compiled with the same things cached."""
    other = ratios.cell(cell_label(cell), mode)
    if other is None or mode == cell.mode or other.compile is None or cell.compile is None:
        return None
    return start_of(other) if other.compile.conditions == cell.compile.conditions else None
