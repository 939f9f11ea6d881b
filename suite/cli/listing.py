"""Make the tables of `encore list` and `encore env`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from models.registry import Workload
from suite.measure.modes import Mode
from suite.report.provenance import facts
from suite.results.schema import Environment


def tables(workloads: Sequence[Workload], modes: Sequence[Mode]) -> list[RenderableType]:
    """Return what `encore list` prints: a table for each kind, then what is special about some workloads."""
    listed: list[RenderableType] = []
    if workloads:
        table = Table("workload", "model", "suite", "task", "batch", "dtypes", "variants", "sets", box=None)
        for workload in workloads:
            several = (", ".join(workload.variants), ", ".join(workload.sets))
            plain = (workload.acronym, workload.name, workload.suite, workload.task, str(workload.batch))
            table.add_row(*plain, workload.dtype_policy, *several)
        listed.append(table)
    if modes:
        table = Table("mode", "what it is", "compared with", box=None)
        for mode in modes:
            table.add_row(mode.name, mode.summary, ", ".join(mode.baselines) or "-")
        listed.append(table)
    notes = [f"{workload.acronym}: {workload.notes}" for workload in workloads if workload.notes]
    split = [f"{each.acronym} (batch {each.sharding.batch})" for each in workloads if each.sharding is not None]
    if split:
        notes.append(f"`encore run --tp N,N` splits over GPUs: {', '.join(split)}")
    return [*listed, Text("\n".join(notes))] if notes else listed


def environment_table(environment: Environment) -> Table:
    """Return what `encore env` prints."""
    table = Table(box=None, show_header=False)
    for name, value in facts(environment).items():
        table.add_row(name, value)
    return table
