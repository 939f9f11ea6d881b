"""Failures that a newer row stands for: a report that did not list them would hide that a cell has ever failed."""

from __future__ import annotations

from suite.report.load import Run, cell_label
from suite.report.table import Table, make_table


def superseded_failures(run: Run) -> Table:
    """Failed cells that were measured again, in the order of the runs."""
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
