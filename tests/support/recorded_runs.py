"""Read the recorded runs once in each process that runs tests: that takes seconds, and no test changes them."""

from __future__ import annotations

import functools
import gc
from pathlib import Path

from suite.report.compare import Ratios
from suite.report.runs import Run, join_runs, run_of
from suite.results.store import ENVIRONMENT, RECORDED, InvalidResults, RecordedRun, list_runs, read_run


@functools.cache
def paths() -> tuple[Path, ...]:
    """Folders of all that one report is made of, oldest first."""
    return tuple(list_runs(RECORDED))


@functools.cache
def _read() -> dict[Path, RecordedRun | InvalidResults]:
    read: dict[Path, RecordedRun | InvalidResults] = {}
    for path in (environment.parent for environment in RECORDED.glob(f"*/{ENVIRONMENT}")):
        try:
            read[path] = read_run(path)
        except InvalidResults as error:  # for the tests that need this run
            read[path] = error
    gc.collect()
    gc.freeze()  # half a million objects that stay: no collection in a test has to walk over them
    return read


def read_recorded(path: Path) -> RecordedRun:
    """Return what `read_run` reads there.

    Raises:
        InvalidResults: as `read_run`.
    """
    read = _read()[path]
    if isinstance(read, InvalidResults):
        raise read
    return read


@functools.cache
def load_recorded(path: Path) -> Run:
    """Return what `load_run` makes of it.

    Raises:
        InvalidResults: as `read_run`.
    """
    return run_of(read_recorded(path))


@functools.cache
def joined() -> Run:
    """Return all of `paths` in one report."""
    return join_runs([load_recorded(path) for path in paths()])


@functools.cache
def comparisons() -> Ratios:
    """Return the ratios of all cells of `joined`."""
    return Ratios(joined().cells)
