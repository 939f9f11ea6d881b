"""Return a run as a pandas DataFrame.

Columns of rows: those of `suite.report.history.HistoryRow` (times in microseconds, ratios with 95 % intervals), and
`batch`, `settled`, `error`, `cuda_graphs`, `coverage_percent` (kernels launched by CUDA graphs), `placeholder_bytes`
(copied in an iteration), `peak_reserved_bytes` (of steady replay) and `first_call_s` (compilation until the first
result).

Columns of samples: `workload`, `mode`, `process`, `block`, `turn`, `host_us` and `device_us`.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import zip_longest

import pandas as pd

from suite.report.compare import has_settled
from suite.report.history.rows import rows_of
from suite.report.runs import Run, cell_label
from suite.results.schema import Cell


def rows_frame(run: Run) -> pd.DataFrame:
    """Return one line for each workload and mode of a run."""
    pairs = zip(rows_of(run), run.cells, strict=True)
    return pd.DataFrame([asdict(row) | _measured(cell) for row, cell in pairs])


def _measured(cell: Cell) -> dict[str, object]:
    """Return what a row of the history lacks; None where it was not measured."""
    metrics = cell.metrics
    graphs, coverage, copies, memory = (
        (metrics.graphs, metrics.coverage, metrics.copies, metrics.memory) if metrics else (None,) * 4
    )
    return {
        "batch": cell.batch,
        "settled": has_settled(cell),
        "error": cell.error,
        "cuda_graphs": graphs and graphs.cuda_graphs,
        "coverage_percent": coverage and coverage.percent,
        "placeholder_bytes": copies and copies.placeholder_bytes,
        "peak_reserved_bytes": memory and memory.replay_peak_reserved_bytes,
        "first_call_s": cell.compile and cell.compile.first_call_s,
    }


def samples_frame(run: Run) -> pd.DataFrame:
    """Return one line for each timed iteration of a run."""
    columns = ["workload", "mode", "process", "block", "turn", "host_us", "device_us"]
    samples = (
        (cell_label(cell), cell.mode, block.process, block.index, block.turn, host_us, device_us)
        for cell in run.cells
        for block in cell.blocks
        for host_us, device_us in zip_longest(block.host_us, block.device_us or [])
    )
    return pd.DataFrame(samples, columns=columns)
