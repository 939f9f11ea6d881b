"""Where memory was not enough behind samples: they stand, and this says what is missing."""

from __future__ import annotations

from suite.report.load import Run, cell_label
from suite.report.table import Table, make_table


def shortages(run: Run) -> Table:
    """One row per process that ran out of memory when its mode had samples; a baseline's is that of the mode beside."""
    return make_table(
        "shortages",
        "Short of memory behind samples",
        "What was measured before stands. phase prepare: the process was not measured, and none after it. measure: it "
        "dropped out while it was timed; ratios are over the blocks that both modes have. metrics: coverage, copies "
        "and kernels are missing, as far as they were not known before. Where samples are of kernels that were not "
        "looked at, ratios between compiled modes have no verdict.",
        ["workload", "mode", "of", "process", "phase", "error"],
        (
            {
                "workload": cell_label(cell),
                "mode": cell.mode,
                "of": one.mode,
                "process": one.process + 1,
                "phase": one.phase,
                "error": one.error,
            }
            for cell in run.cells
            for one in cell.shortages
        ),
    )
