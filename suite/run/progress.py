"""Say what a run does, for how long, and how long it will still take: a line for each event."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console

from suite.results.schema import Cell, Status
from suite.settings import format_duration


def outcome(cell: Cell) -> str:
    """Return one line on how a cell ended."""
    words = f"{cell.workload} {cell.mode}: {cell.status} in {format_duration(cell.wall_s)}"
    if cell.status is not Status.PASS:
        words = f"{words}: {cell.first_error_line}"
    short = (f"{'' if one.mode == cell.mode else f'{one.mode}, '}{one}" for one in cell.shortages)
    return "; ".join((words, *short))


class Display:
    """Print one line per event, each with the time of day."""

    def __init__(self, console: Console, estimates_s: Mapping[str, float]) -> None:
        self._console = console
        self._waiting = dict(estimates_s)
        self._count = len(estimates_s)
        self._number = 0
        self._workload = ""

    def workload_starts(self, workload: str, modes: Sequence[str]) -> None:
        """Report that these modes of this workload run next, some or all of them side by side."""
        left = format_duration(sum(self._waiting.values()))
        self._waiting.pop(workload, None)
        self._workload = workload
        self._number += 1
        self.note(f"{workload} ({self._number} of {self._count}, about {left} left): {', '.join(modes)}")

    def phase(self, mode: str, phase: str) -> None:
        """Report that a mode of the current workload has entered a phase."""
        self.note(f"{self._workload} {mode}: {phase}")

    def measured(self, mode: str, blocks: int) -> None:
        """Report that a process of a mode has measured its blocks."""
        self.note(f"{self._workload} {mode}: measured {blocks} blocks")

    def cell_ends(self, cell: Cell) -> None:
        """Report that a cell is final and on disk."""
        self.note(outcome(cell))

    def note(self, text: str) -> None:
        """Report something the user should know, on its own line."""
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True)
