"""Return a run as a pandas DataFrame, and keep the rows of recorded runs in `results/history.csv`.

Columns of rows: those of the history (`HISTORY_COLUMNS`: times in microseconds over all samples, `host_us` of an
iteration from its start to its completion, `kernel_us` of its kernels alone; `over_compile` and `over_graph` say how
many times faster the mode is than these modes of the same run, with 95 % intervals, and are empty where the two did not
run the same kernels, or one did not pass or had not settled), and `batch`, `settled`, `error`, `cuda_graphs`,
`coverage_percent` (kernels launched by CUDA graphs), `placeholder_bytes` (copied in an iteration),
`peak_reserved_bytes` (of steady replay) and `first_call_s` (compilation until the first result).

Columns of samples: `workload`, `mode`, `process`, `block`, `turn`, `host_us` and `device_us`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import pandas as pd

from suite.report.cell_tables import host_median_us
from suite.report.compare import STOCK_MODES, Ratios, baselines, has_settled
from suite.report.runs import Run, cell_label
from suite.results.errors import WrongUse
from suite.results.schema import Cell, Status
from suite.results.store import REPOSITORY, describe, write_atomically

HISTORY = REPOSITORY / "results" / "history.csv"
_TEXTS = ("run", "created_at", "commit", "device", "torch", "driver", "workload", "mode", "status")
_NUMBERS = ("host_us", "kernel_us", *(f"over_{mode}{end}" for mode in STOCK_MODES for end in ("", "_low", "_high")))
HISTORY_COLUMNS = (*_TEXTS, "processes", *_NUMBERS)


def rows_frame(run: Run) -> pd.DataFrame:
    """Return one line for each workload and mode of a run, in the order of its cells."""
    ratios = Ratios(run.cells)
    return pd.DataFrame([_row(run, cell, ratios) for cell in run.cells])


def _row(run: Run, cell: Cell, ratios: Ratios) -> dict[str, object]:
    environment = run.environment
    row: dict[str, object] = {
        "run": environment.run_id,
        "created_at": environment.created_at[:19],
        "commit": (environment.git_commit or "unknown")[:10] + ("+" if environment.git_dirty else ""),
        "device": run.device,
        "torch": environment.torch,
        "driver": environment.driver or "",
        "workload": cell_label(cell),
        "mode": cell.mode,
        "status": cell.status.value,
        "processes": len({block.process for block in cell.blocks}),
        "host_us": _rounded(host_median_us(cell) if cell.status is Status.PASS else None),
        "kernel_us": _rounded(cell.at("metrics.kernel_time_us")),
    }
    for mode in STOCK_MODES:
        found = ratios.gain(cell_label(cell), cell.mode, mode) if mode in baselines(cell) else None
        numbers = (found.value, *found.interval()) if found is not None else (None,) * 3
        row |= {f"over_{mode}{end}": _rounded(one) for end, one in zip(("", "_low", "_high"), numbers, strict=True)}
    return row | {
        "batch": cell.batch,
        "settled": has_settled(cell),
        "error": cell.error,
        "cuda_graphs": cell.at("metrics.graphs.cuda_graphs"),
        "coverage_percent": cell.at("metrics.coverage.percent"),
        "placeholder_bytes": cell.at("metrics.copies.placeholder_bytes"),
        "peak_reserved_bytes": cell.at("metrics.memory.replay_peak_reserved_bytes"),
        "first_call_s": cell.at("compile.first_call_s"),
    }


def _rounded(value: float | None) -> float | None:
    """Round to five digits, which is beyond the accuracy of all values; an infinite end of an interval is None."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


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


def read_history(path: Path = HISTORY) -> pd.DataFrame:
    """Read the rows of a history file; none where there is no such file.

    Raises:
        WrongUse: the file has other columns, or a field is not a number.
    """
    if not path.exists():
        return pd.DataFrame(columns=HISTORY_COLUMNS)
    try:
        rows = pd.read_csv(
            path,
            dtype=dict.fromkeys(_TEXTS, str) | dict.fromkeys(_NUMBERS, float) | {"processes": int},
            keep_default_na=False,
            na_values={name: [""] for name in _NUMBERS},
        )
    except ValueError as error:
        raise WrongUse(f"{describe(path)}: {error}; restore it from git") from error
    if tuple(rows.columns) != HISTORY_COLUMNS:
        raise WrongUse(f"{describe(path)} has other columns than this version writes; restore it from git")
    return rows


def write_history(several: Sequence[pd.DataFrame], path: Path = HISTORY) -> None:
    """Write a history file of these rows, ordered by run, workload and mode, each (run, workload, mode) once.

    Raises:
        OSError: a file cannot be written; the old file is intact.
    """
    key = ["created_at", "run", "workload", "mode"]
    rows = pd.concat([one for one in several if len(one)] or list(several))
    unique = rows.drop_duplicates(key, keep="last").sort_values(key)
    text = unique.to_csv(columns=list(HISTORY_COLUMNS), index=False, lineterminator="\n", float_format="%g")
    write_atomically(path, text)
