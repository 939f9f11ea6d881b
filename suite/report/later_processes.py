"""A mode is started several times, and its samples are of all its processes: what the later ones did otherwise."""

from __future__ import annotations

from collections.abc import Iterable

from suite.report.load import Run, cell_label
from suite.report.table import Table, make_table
from suite.schema import LaterProcess

TUNING = "CachingAutotuner.benchmark_all_configs"
"""Inductor's timer around the runs of a kernel's configurations."""


def later_processes(run: Run) -> Table:
    """One row per process after the first of its mode, where rows have them."""
    return make_table(
        "later_processes",
        "Later processes of a mode",
        "What a mode's processes after the first did. All that they compile is cached, and verdicts of selection are "
        "stored. So nothing should have been tuned (tuning), no kernel be another than in the first process (retuned; "
        "where there are any, ratios of the mode have no verdict), and no stored verdict be given up (voided).",
        ["workload", "mode", "process", "first_call_s", "tuning_s", "retuned", "settled", "kept", "verdicts", "voided"],
        (
            {"workload": cell_label(cell), "mode": cell.mode, **_row(process)}
            for cell in run.cells
            for process in cell.later
        ),
    )


def _row(process: LaterProcess) -> dict[str, object]:
    times, served = process.compile, process.selection
    return {
        "process": process.process + 1,
        "first_call_s": times.first_call_s if times else None,
        "tuning_s": times.parts.get(TUNING) if times else None,
        "retuned": "; ".join(process.retuned) or None,
        "settled": None if times is None or times.settled is None else "yes" if times.settled else "no",
        "kept": _each(one.kept or one.state for one in served),
        "verdicts": _each(one.source or one.reason or "" for one in served),
        "voided": _each(reason for one in served for reason in one.voided),
    }


def _each(texts: Iterable[str]) -> str | None:
    """Each text once, in the order in which they came; None without any."""
    return "; ".join(dict.fromkeys(text for text in texts if text)) or None
