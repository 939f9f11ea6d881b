"""Find what is compared: a run, or one mode of a run, from what was written on the command line."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from suite.report.load import Run, load_run
from suite.results.errors import WrongUse
from suite.results.schema import Cell
from suite.results.store import find_run


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison. `mode` is set where only this mode of the run is meant."""

    name: str
    run: Run
    mode: str | None = None

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.run.cells if self.mode in (None, cell.mode))

    @property
    def missing(self) -> tuple[tuple[str, str], ...]:
        """Return the (workload, mode) pairs that the run set out to measure and has not."""
        return tuple(pair for pair in self.run.missing if self.mode in (None, pair[1]))


def find_side(text: str) -> Side:
    """Find the run of this name or folder, or after a colon one of its modes: "nightly" or "nightly:graph".

    Raises:
        WrongUse: there is no such run, or the run has no such mode; the message names the nearest ones.
        InvalidResults: a file of the run has wrong fields.
    """
    try:
        return Side(text, load_run(find_run(text)))
    except WrongUse:
        name, colon, mode = text.rpartition(":")
        if not colon or not name:
            raise
    run = load_run(find_run(name))
    if mode not in run.modes:
        near = difflib.get_close_matches(mode, run.modes, n=3) or run.modes
        raise WrongUse(f"run {name!r} has no mode {mode!r}; it has {', '.join(near) or 'no cell yet'}")
    return Side(text, run, mode)
