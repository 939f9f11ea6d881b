"""Find self-contained metrics, which define their measurement, their columns and their section of the report.

A module of this package with a `METRIC` is found automatically: nothing else is edited. The worker measures each once
per cell, after the timed blocks and before the profiler runs. The row has the values under `metrics.more`; the report
has a section and a table for each. Values for the suite's figures (coverage, copies, memory) have separate fields in
`suite.results.schema`.
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
    """Provide a cell to a metric: a workload in a mode that is compiled, warmed up and settled.

    Attributes:
        iterate: runs one iteration; its argument selects the inputs, and any number is allowed.
        device: device of the workload.
        largest: returns the largest of the ranks' numbers; with one process, its own number. Iterations contain
            collectives, so a rank with one more iteration than the others would wait forever. Use this function for
            every number that decides how often `iterate` is called.
        core: the logical core that the calling thread is bound to while timing, the same in all modes. Ranks use
            different cores, because on one core they would wait for each other. None: there is no choice.
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
        title, note: text above and below the table in the report.
        columns: names of the values, each with its unit as suffix ("issue_us").
        measure: returns the values by column; None if there is nothing to measure.
        standing: returns the values of a row that are still valid; None: all. Its argument is the row, with metrics.
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
