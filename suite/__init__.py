"""Measure programs with Encore's benchmark suite; `suite.load(run)` returns the rows of a run as a pandas DataFrame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load"]


def load(run: str | Path, *, samples: bool = False) -> pd.DataFrame:
    """Read a run as a DataFrame with a line for each workload and mode; see `suite.report.frame` for the columns.

    Args:
        run: a name in results/runs or results/recorded, or a folder.
        samples: give a line for each timed iteration instead.

    Raises:
        WrongUse: there is no such run.
        InvalidResults: a file of the run has wrong fields.
    """
    from suite.report.frame import rows_frame, samples_frame
    from suite.report.runs import load_run
    from suite.results.store import find_run

    return (samples_frame if samples else rows_frame)(load_run(find_run(str(run))))
