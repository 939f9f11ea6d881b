"""Keep one row for each workload and mode of every recorded run in `results/history.csv`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from suite.report.compare import Comparison, TimeKind, compare
from suite.report.runs import Run, cell_label
from suite.results.errors import WrongUse
from suite.results.schema import Cell, Status
from suite.results.store import REPOSITORY, describe, write_atomically

HISTORY = REPOSITORY / "results" / "history.csv"
BASELINES = ("compile", "graph")
"""Modes whose ratios a row has: `compile` has no CUDA graphs, `graph` has PyTorch's."""


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """Hold a workload in one mode of one run.

    Times are medians in microseconds over all samples: `host_us` of an iteration from its start to its completion,
    `kernel_us` of its kernels alone. `over_compile` and `over_graph` say how many times faster the mode is than these
    modes of the same run, with 95 % intervals; None where the two did not run the same kernels, or one did not pass
    or had not settled.
    """

    run: str
    created_at: str
    commit: str
    device: str
    torch: str
    driver: str
    workload: str
    mode: str
    status: str
    processes: int
    host_us: float | None
    kernel_us: float | None
    over_compile: float | None
    over_compile_low: float | None
    over_compile_high: float | None
    over_graph: float | None
    over_graph_low: float | None
    over_graph_high: float | None

    def ratio(self, baseline: str) -> tuple[float, float, float] | None:
        """Return how many times faster the mode is than `baseline` ("compile" or "graph"), with the ends of its
        interval."""
        found = tuple(getattr(self, f"over_{baseline}{end}") for end in ("", "_low", "_high"))
        return None if None in found else found


def rows_of(run: Run) -> list[HistoryRow]:
    """Return the rows of a run, in the order of its cells.

    Raises:
        EncoreError: a recorded time is not positive.
    """
    gains = {
        (id(item.cell), item.baseline): item
        for item in compare(run, (TimeKind.LATENCY,))
        if item.is_gain and item.baseline in BASELINES
    }
    return [_row(run, cell, [gains.get((id(cell), baseline)) for baseline in BASELINES]) for cell in run.cells]


def _row(run: Run, cell: Cell, gains: list[Comparison | None]) -> HistoryRow:
    environment = run.environment
    samples = [time for block in cell.blocks for time in block.host_us] if cell.status is Status.PASS else []
    kernel_us = cell.metrics.kernel_time_us if cell.metrics else None
    ratios = [
        number
        for gain in gains
        for number in (
            (gain.ratio.value, gain.ratio.low, gain.ratio.high) if gain and gain.ratio else (None, None, None)
        )
    ]
    return HistoryRow(
        environment.run_id,
        environment.created_at[:19],
        (environment.git_commit or "unknown")[:10] + ("+" if environment.git_dirty else ""),
        run.device,
        environment.torch,
        environment.driver or "",
        cell_label(cell),
        cell.mode,
        cell.status.value,
        len({block.process for block in cell.blocks}),
        _rounded(median(samples)) if samples else None,
        _rounded(kernel_us),
        *map(_rounded, ratios),
    )


def _rounded(value: float | None) -> float | None:
    """Round to five digits: more than any of these numbers is known to. An open end of an interval is None."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


_COLUMNS = tuple(field.name for field in fields(HistoryRow))
_TEXTS = _COLUMNS[: _COLUMNS.index("processes")]


def read_history(path: Path = HISTORY) -> list[HistoryRow]:
    """Read the rows of a history file; none where there is no such file.

    Raises:
        WrongUse: the file has other columns, or a field is not a number; the message has the line.
    """
    if not path.exists():
        return []
    rows = []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != _COLUMNS:
            raise WrongUse(f"{describe(path)} has other columns than this version writes; restore it from git")
        for line in reader:
            try:
                rows.append(HistoryRow(**{name: _value(name, line[name]) for name in _COLUMNS}))
            except (ValueError, TypeError) as error:
                where = f"{describe(path)} line {reader.line_num}"
                raise WrongUse(f"{where}: {error}; every field but the texts is a number or empty") from error
    return rows


def _value(name: str, text: str) -> Any:
    if name in _TEXTS:
        return text
    return int(text) if name == "processes" else float(text) if text else None


def write_history(rows: Iterable[HistoryRow], path: Path = HISTORY) -> None:
    """Write a history file of these rows, ordered by run, workload and mode, each (run, workload, mode) once.

    Raises:
        CannotWrite: the disk is full; the old file is intact.
    """
    unique = {(row.created_at, row.run, row.workload, row.mode): row for row in rows}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for _, row in sorted(unique.items()):
        values = (getattr(row, name) for name in _COLUMNS)
        writer.writerow(
            "" if value is None else f"{value:g}" if isinstance(value, float) else value for value in values
        )
    write_atomically(path, text.getvalue())
