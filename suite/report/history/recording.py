"""Maintain `results/recorded`: packed runs and their page; the history keeps the rows of deleted runs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

from suite.report.frame import read_history, rows_frame, write_history
from suite.report.markdown_pages import update_page
from suite.report.runs import load_run
from suite.report.units import markdown_table
from suite.results.errors import WrongUse
from suite.results.schema import Cell
from suite.results.store import (
    CELLS,
    ENVIRONMENT,
    PACKED,
    describe,
    lines_of,
    read_environment,
    read_run,
    read_unpacked,
    write_atomically,
)

PAGE, PART = "README.md", "recorded"
"""The page of the folder, and the name of its generated part."""
_MOST_NAMES = 6
"""Workloads and modes are counted instead of named where there are more."""


def record_run(run: Path, recorded: Path, history: Path) -> Path:
    """Pack a finished run into the folder of recorded runs, add its rows to the history, and return its path.

    Sketches of outputs that vary between calls are left out: only a continued run needs them, and they use most of the
    space of a large training workload.

    Raises:
        WrongUse: the run is not finished, or one of its name is recorded.
        InvalidResults: a file of the run has wrong fields.
        OSError: a file cannot be written.
    """
    read = read_run(run)
    if not read.cells:
        raise WrongUse(f"{describe(run)} is not finished; finish it with `encore run --resume {describe(run)}`")
    folder = recorded / read.environment.run_id
    if folder.exists():
        raise WrongUse(f"{describe(folder)} exists; a run is recorded once")
    pack_cells(read.cells, folder)
    write_atomically(folder / ENVIRONMENT, (run / ENVIRONMENT).read_bytes())
    write_history([read_history(history), rows_frame(load_run(folder))], history)
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


def renew_page(recorded: Path) -> None:
    """Write the table of recorded runs into the folder's page.

    Raises:
        WrongUse: the page has no place for the table.
    """
    update_page(recorded / PAGE, {PART: listing(recorded)})


def listing(recorded: Path) -> str:
    """List the recorded runs as a Markdown table, one line for each."""
    runs = sorted(path.parent for path in recorded.rglob(ENVIRONMENT))
    rows = [_of_run(run, recorded) for run in runs]
    return "\n".join(markdown_table(("what", "made by", "device", "commit", "workloads", "modes", "processes"), rows))


def _of_run(run: Path, recorded: Path) -> tuple[str, ...]:
    environment = read_environment(run)
    file = run / PACKED if (run / PACKED).exists() else run / CELLS
    rows = [json.loads(line) for line in read_unpacked(file).splitlines()]
    with_optimizer = " --with-optimizer" if environment.settings.get("with_optimizer") else ""
    processes = {row_count for row in rows if (row_count := len({block.get("process", 0) for block in row["blocks"]}))}
    return (
        f"`{run.relative_to(recorded)}`",
        f"`encore run{with_optimizer}`",
        f"{environment.gpu_count} x " * (environment.gpu_count > 1) + environment.device,
        (environment.git_commit or "unknown")[:10],
        _named(row["workload"] for row in rows),
        _named(row["mode"] for row in rows),
        " to ".join(str(count) for count in sorted({min(processes, default=0), max(processes, default=0)})),
    )


def _named(names: Iterable[str]) -> str:
    found = list(dict.fromkeys(names))
    return ", ".join(found) if len(found) <= _MOST_NAMES else str(len(found))
