"""What happened besides measuring: later processes, missing samples, and failures that were measured again."""

from __future__ import annotations

from collections.abc import Iterable

from suite.report.load import Run, cell_label
from suite.report.table import Table, make_table
from suite.results.schema import LaterProcess

TUNING = "CachingAutotuner.benchmark_all_configs"
"""Inductor's timer around the runs of a kernel's configurations."""


def later_processes(run: Run) -> Table:
    """One row per process after the first of its mode, where rows have them."""
    return make_table(
        "later_processes",
        "Later processes of a mode",
        "What a mode's processes after the first did. All that they compile is cached. So nothing should have been "
        "tuned (tuning), and no kernel be another than in the first process (retuned; where there are any, ratios of "
        "the mode have no verdict). kept: how selection served calls.",
        ["workload", "mode", "process", "first_call_s", "tuning_s", "retuned", "settled", "kept", "voided"],
        (
            {"workload": cell_label(cell), "mode": cell.mode, **_later(process)}
            for cell in run.cells
            for process in cell.later
        ),
    )


def _later(process: LaterProcess) -> dict[str, object]:
    times, served = process.compile, process.selection
    return {
        "process": process.process + 1,
        "first_call_s": times.first_call_s if times else None,
        "tuning_s": times.parts.get(TUNING) if times else None,
        "retuned": "; ".join(process.retuned) or None,
        "settled": None if times is None or times.settled is None else "yes" if times.settled else "no",
        "kept": _each(one.kept or one.state for one in served),
        "voided": _each(reason for one in served for reason in one.voided),
    }


def _each(texts: Iterable[str]) -> str | None:
    """Each text once, in the order in which they came; None without any."""
    return "; ".join(dict.fromkeys(text for text in texts if text)) or None


def shortages(run: Run) -> Table:
    """One row per process that ran out of memory, or was interrupted, when its mode had samples."""
    return make_table(
        "shortages",
        "Missing after samples",
        "What was measured before stands. reason memory: there was not enough. interrupted: the run ended before the "
        "workload was through; `--resume` measures it again. phase prepare: the process was not measured, and none "
        "after it. measure: it dropped out while it was timed; ratios are over the blocks that both modes have. "
        "metrics: coverage, copies and kernels are missing, as far as they were not known before. Where samples are "
        "of kernels that were not checked, ratios between compiled modes have no verdict.",
        ["workload", "mode", "of", "process", "reason", "phase", "error"],
        (
            {
                "workload": cell_label(cell),
                "mode": cell.mode,
                "of": one.mode,
                "process": one.process + 1,
                "reason": one.reason,
                "phase": one.phase,
                "error": one.error,
            }
            for cell in run.cells
            for one in cell.shortages
        ),
    )


def superseded_failures(run: Run) -> Table:
    """Failed cells that were measured again: a report without them would hide that a cell has ever failed."""
    return make_table(
        "superseded",
        "Failed before, measured again since",
        "These rows are in no other table: the workload was measured again, later in the same run or in another one.",
        ["workload", "mode", "status", "error", "failed_in", "replaced_by"],
        (
            {
                "workload": cell_label(each.cell),
                "mode": each.cell.mode,
                "status": each.cell.status.value,
                "error": each.cell.error,
                "failed_in": each.run_id,
                "replaced_by": each.by or "the same run",
            }
            for each in run.superseded
        ),
    )
