"""Where memory was not enough behind samples, or the run ended: they stand, and this says what is missing."""

from __future__ import annotations

from suite.report.load import Run, cell_label
from suite.report.table import Table, make_table


def shortages(run: Run) -> Table:
    """One row per process that ran out of memory, or was interrupted, when its mode had samples; a baseline's is that
    of the mode beside."""
    return make_table(
        "shortages",
        "Missing behind samples",
        "What was measured before stands. reason memory: there was not enough. interrupted: the run ended before the "
        "workload was through; `--resume` measures it again. phase prepare: the process was not measured, and none "
        "after it. measure: it dropped out while it was timed; ratios are over the blocks that both modes have. "
        "metrics: coverage, copies and kernels are missing, as far as they were not known before. Where samples are "
        "of kernels that were not looked at, ratios between compiled modes have no verdict.",
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
