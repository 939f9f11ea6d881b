"""Find metrics that bring everything along: how they are measured, their place in the row and in the report.

A module of this package that holds a `METRIC` is found by itself: nothing else is edited. The worker measures each once
per cell, after the timed blocks and before the profiler runs; the values stand in the row under `metrics.more`; the
report has a section and a table for each. What the suite's own figures need (coverage, copies, memory) has fields of
its own in `suite.results.schema`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from suite.measure.modes import Mode
from suite.results.schema import Cell

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class PreparedCell:
    """Hold what a metric is measured on: a workload in a mode that is compiled, warmed up and settled.

    Attributes:
        iterate: runs one iteration; the number says which of the prepared inputs it takes, and all numbers are allowed.
        device: where the workload runs.
        largest: of a number that each process which works on the cell finds, the largest one. An iteration may be a
            collective, and a process that runs one more than the others waits for ever: whatever decides how often
            `iterate` is called goes through this, in all of them. Where there is one process, its own number.
        core: the logical core that the calling thread is bound to where something is timed, the same in all modes.
            Each process that works on the cell has its own: on one core they would wait for each other. None: there is
            no choice.
        module: the program's module, which the iterations run.
    """

    iterate: Callable[[int], object]
    device: torch.device
    mode: Mode
    largest: Callable[[float], float] = float
    core: int | None = None
    module: torch.nn.Module | None = None


@dataclass(frozen=True, slots=True)
class Metric:
    """Describe one metric. Its module imports heavy libraries inside of functions, because reports import it too.

    Attributes:
        name: of its table and its CSV file; also its key in the row.
        title, note: what the report says above and below the table.
        columns: of the values, each with its unit at the end of its name ("issue_us").
        measure: gives the values by column; None where there is nothing to measure.
        standing: of the values in a row those that may still be shown; None: all. It is given the row, with metrics.
    """

    name: str
    title: str
    note: str
    columns: tuple[str, ...]
    measure: Callable[[PreparedCell], Mapping[str, float | None]]
    standing: Callable[[Cell], Mapping[str, float | None]] | None = None

    def of_row(self, row: Cell) -> Mapping[str, float | None]:
        """Return the values that reports show of a cell."""
        if row.metrics is None:
            return {}
        return row.metrics.more.get(self.name, {}) if self.standing is None else self.standing(row)

    def values(self, cell: PreparedCell) -> dict[str, float | None]:
        """Return the measured values.

        Raises:
            KeyError: a value has no column.
        """
        values = dict(self.measure(cell))
        if unknown := values.keys() - set(self.columns):
            raise KeyError(f"metric {self.name!r} gives {', '.join(sorted(unknown))}, which its columns do not name")
        return values


@cache
def metrics() -> tuple[Metric, ...]:
    """Return all metrics, by the names of their modules."""
    modules = (import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))
    return tuple(module.METRIC for module in modules)
