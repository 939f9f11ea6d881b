"""Show what a run does, for how long, and how long it will still take. Live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from suite.results.schema import Cell, Status
from suite.settings import format_duration

FIRST_WORD_S = 2.0
"""Seconds that an analysis may take over a step before a line says so."""
NEXT_WORD_S = 30.0
"""Seconds that it may then stay silent over the same step."""


class Display(Protocol):
    """Report what happens in a run. Used as a context manager around it."""

    def workload_starts(self, workload: str, modes: Sequence[str]) -> None:
        """Report that these modes of this workload run next, some or all of them side by side."""

    def phase(self, mode: str, phase: str) -> None:
        """Report that a mode of the current workload has entered a phase."""

    def block_measured(self, mode: str, done: int, blocks: int) -> None:
        """Report that a mode has measured `done` of its `blocks`."""

    def cell_ends(self, cell: Cell) -> None:
        """Report that a cell is final and on disk."""

    def workload_ends(self) -> None:
        """Report that the current workload is through."""

    def note(self, text: str) -> None:
        """Report something the user should know, on its own line."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class TimeLeft:
    """Estimate the seconds left in a run: those of what has not ended, less what the current workload has used."""

    def __init__(self, estimates_s: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._waiting = dict(estimates_s)
        self._clock = clock
        self._current_s = 0.0
        self._since = clock()

    def starts(self, workload: str) -> None:
        self._current_s = self._waiting.pop(workload, 0.0)
        self._since = self._clock()

    def ends(self) -> None:
        self._current_s = 0.0

    def seconds(self) -> float:
        current = max(0.0, self._current_s - (self._clock() - self._since))
        return current + sum(self._waiting.values())


def display_for(console: Console, estimates_s: Mapping[str, float]) -> Display:
    """Return a live display where the console is a terminal, plain lines otherwise (a file, a pipe, CI)."""
    kind = LiveDisplay if console.is_terminal and not console.is_dumb_terminal else LineDisplay
    return kind(console, estimates_s)


def outcome(cell: Cell) -> str:
    """Return one line on how a cell ended."""
    words = f"{cell.workload} {cell.mode}: {cell.status} in {format_duration(cell.wall_s)}"
    if cell.status is not Status.PASS:
        words = f"{words}: {cell.first_error_line}"
    short = (f"{'' if one.mode == cell.mode else f'{one.mode}, '}{one}" for one in cell.shortages)
    return "; ".join((words, *short))


class LineDisplay:
    """Print one line per event, each with the time of day."""

    def __init__(self, console: Console, estimates_s: Mapping[str, float]) -> None:
        self._console = console
        self._left = TimeLeft(estimates_s)
        self._count = len(estimates_s)
        self._number = 0
        self._workload = ""

    def workload_starts(self, workload: str, modes: Sequence[str]) -> None:
        left = format_duration(self._left.seconds())
        self._left.starts(workload)
        self._workload = workload
        self._number += 1
        self.note(f"{workload} ({self._number} of {self._count}, about {left} left): {', '.join(modes)}")

    def phase(self, mode: str, phase: str) -> None:
        self.note(f"{self._workload} {mode}: {phase}")

    def block_measured(self, mode: str, done: int, blocks: int) -> None:
        if done == blocks:
            self.note(f"{self._workload} {mode}: measured {blocks} blocks")

    def cell_ends(self, cell: Cell) -> None:
        self.note(outcome(cell))

    def workload_ends(self) -> None:
        self._left.ends()

    def note(self, text: str) -> None:
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class LiveDisplay:
    """Show a bar over all workloads and the phase of each mode of the current one; ended cells scroll by above it."""

    def __init__(self, console: Console, estimates_s: Mapping[str, float]) -> None:
        self._console = console
        self._left = TimeLeft(estimates_s)
        self._count = len(estimates_s)
        self._ended = 0
        self._workload = ""
        self._phases: dict[str, str] = {}
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    def workload_starts(self, workload: str, modes: Sequence[str]) -> None:
        self._left.starts(workload)
        self._workload = workload
        self._phases = dict.fromkeys(modes, "waiting")

    def phase(self, mode: str, phase: str) -> None:
        self._phases[mode] = phase

    def block_measured(self, mode: str, done: int, blocks: int) -> None:
        self._phases[mode] = f"measure, block {done} of {blocks}"

    def cell_ends(self, cell: Cell) -> None:
        self._phases.pop(cell.mode, None)
        style = "green" if cell.status is Status.PASS else "red"
        self._console.print(Text(outcome(cell), style=style))

    def workload_ends(self) -> None:
        self._ended += 1
        self._left.ends()
        self._phases = {}

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def _render(self) -> RenderableType:
        bar = Table.grid(padding=(0, 1))
        left = format_duration(self._left.seconds())
        bar.add_row(
            ProgressBar(total=max(1, self._count), completed=self._ended, width=40),
            f"{self._ended} of {self._count} workloads, about {left} left",
        )
        modes = Table.grid(padding=(0, 1))
        for mode, phase in self._phases.items():
            modes.add_row(self._workload, mode, phase)
        return Group(bar, modes)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
