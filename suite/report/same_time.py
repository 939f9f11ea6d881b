"""Which workloads were measured while others were, or while other programs were at work on the host.

On one host they disturb each other's host times, most of all those of mode `compile`, whose host has most to do. Shards
of one run may be on the GPUs of one host: a row does not say which host it is of, so shards on several hosts are named
as well. Of other programs only rows since 2026-11-26 know (`suite.results.schema.HostUse`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from suite.report.load import Run, cell_label
from suite.results.schema import Cell, Environment, HostUse

ROUNDING = timedelta(seconds=1)
"""Of the time at which a row begins. Workloads of one process of the suite follow one another, and overlap by less."""


DISTURBING_CORES = 1.0
"""That other programs keep busy. What an idle host does by itself is some tenths of a core."""


def beside_others(run: Run) -> tuple[str, ...]:
    """What the rows are called that were measured beside other workloads or other programs, in the order of cells."""
    found = {*at_the_same_time(run), *beside_programs(run)}
    return tuple(label for label in run.labels if label in found)


def beside_programs(run: Run) -> tuple[str, ...]:
    """What the rows are called of which a mode says that other programs were at work on the host meanwhile."""
    found = {cell_label(cell) for cell in run.cells if cell.others is not None and _disturbs(cell.others)}
    return tuple(label for label in run.labels if label in found)


def _disturbs(others: HostUse) -> bool:
    return (others.cpu_cores or 0.0) >= DISTURBING_CORES or bool(others.gpus_at_work)


def at_the_same_time(run: Run) -> tuple[str, ...]:
    """What the rows are called that were measured while rows of another part of the run were, in the order of cells.

    Parts are what `encore merge` has joined, of which all that is known is that no workload is in two of them, or the
    runs of a report.
    """
    spans = [(part, cell_label(cell), *_span(cell)) for part, cells in _parts(run) for cell in cells]
    found = {
        label
        for part, label, begin, end in spans
        if any(
            part != other and begin + ROUNDING < until and start + ROUNDING < end for other, _, start, until in spans
        )
    }
    return tuple(label for label in run.labels if label in found)


def said(run: Run) -> str:
    """Sentences about them, "" where there are none."""
    count, beside = len(at_the_same_time(run)), len(beside_programs(run))
    text = ""
    if count:
        text = (
            f" {count} workloads were measured at the same time as others: if that was on one host, they disturbed "
            "each other's host times, those of mode compile most."
        )
    if beside:
        text += (
            f" {beside} workloads were measured while other programs kept a core or another GPU of the host busy, "
            "which makes host times longer, those of mode compile most."
        )
    return text


def _parts(run: Run) -> list[tuple[str, Sequence[Cell]]]:
    """Cells that were measured by different processes of the suite, as far as is known, each with a name."""
    found: list[tuple[str, Sequence[Cell]]] = []
    for number, each in enumerate(run.parts or (run,)):
        if is_merged(each.environment):
            found += [(f"{number} {cell_label(cell)}", [cell]) for cell in each.cells]
        else:
            found.append((str(number), each.cells))
    return found


def is_merged(environment: Environment) -> bool:
    """Whether `encore merge` has made the run."""
    return bool(environment.settings.get("parts")) or environment.command_line[1:2] == ["merge"]


def _span(cell: Cell) -> tuple[datetime, datetime]:
    begin = datetime.fromisoformat(cell.started_at)
    return begin, begin + timedelta(seconds=cell.wall_s)
