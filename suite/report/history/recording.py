"""Keep in git what `results/recorded` holds: runs packed small, and history rows of the others."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from suite.report.history.rows import read_history, rows_of, write_history
from suite.report.runs import load_run
from suite.results.errors import WrongUse
from suite.results.schema import Cell
from suite.results.store import ENVIRONMENT, PACKED, describe, lines_of, read_run, write_atomically


def record_run(run: Path, recorded: Path, history: Path) -> Path:
    """Pack a finished run into the folder of recorded runs, add its rows to the history, and return where it is.

    Sketches of outputs that vary between calls are left out: they serve only to go on with a run, and take most of
    the space of a large training workload.

    Raises:
        WrongUse: the run is not finished, or one of its name is recorded.
        InvalidResults: a file of the run has wrong fields.
        CannotWrite: the disk is full.
    """
    read = read_run(run)
    if read.cut_line is not None or not read.cells:
        raise WrongUse(f"{describe(run)} is not finished; finish it with `encore run --resume {describe(run)}`")
    folder = recorded / read.environment.run_id
    if folder.exists():
        raise WrongUse(f"{describe(folder)} exists; a run is recorded once")
    pack_cells(read.cells, folder)
    write_atomically(folder / ENVIRONMENT, (run / ENVIRONMENT).read_bytes())
    _add_rows([folder], history)
    return folder


def pack_cells(cells: Iterable[Cell], folder: Path) -> None:
    """Write rows packed and without sketches of varying outputs. The same rows always give the same bytes."""
    small = [
        cell.model_copy(update={"correctness": cell.correctness.model_copy(update={"varying": None})})
        if cell.correctness and cell.correctness.varying
        else cell
        for cell in cells
    ]
    write_atomically(folder / PACKED, gzip.compress(lines_of(small).encode(), compresslevel=9, mtime=0))


def retire_runs(folders: Sequence[Path], history: Path) -> None:
    """Add the rows of runs to the history, then delete the runs.

    Raises:
        InvalidResults: a file of a run has wrong fields.
        CannotWrite: the disk is full; nothing was deleted.
    """
    _add_rows(folders, history)
    for folder in folders:
        shutil.rmtree(folder)


def _add_rows(folders: Sequence[Path], history: Path) -> None:
    rows = (row for folder in folders for row in rows_of(load_run(folder)))
    write_history([*read_history(history), *rows], history)
