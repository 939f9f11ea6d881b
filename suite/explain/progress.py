"""Show the progress of `encore explain`: the step of each target, and how long it has taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from suite.explain.targets import Target
from suite.run.progress import FIRST_WORD_S, NEXT_WORD_S, format_duration


@dataclass(slots=True)
class _Step:
    name: str
    target_since: float
    said: str
    said_at: float


class AnalysisDisplay:
    """Show what `encore explain` is doing: on a terminal a line per target that is being explained, elsewhere a line
    when a step takes long, and again every half a minute, so that it never seems to hang without a word."""

    def __init__(self, console: Console, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._limit = format_duration(timeout_s)
        self._clock = clock
        self._steps: dict[Target, _Step] = {}
        is_live = console.is_terminal and not console.is_dumb_terminal
        # Standard output is for what is found, wherever it goes; rich would send it to the terminal of the progress.
        self._live = (
            Live(get_renderable=self._render, console=console, transient=True, redirect_stdout=False)
            if is_live
            else None
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the live lines away while something is printed, so that they do not mix on one terminal."""
        if self._live is None:
            yield
            return
        self._live.stop()
        try:
            yield
        finally:
            self._live.start()

    def step(self, target: Target, step: str) -> None:
        now = self._clock()
        known = self._steps.setdefault(target, _Step(step, now, "", now))
        known.name = step

    def ended(self, target: Target) -> None:
        self._steps.pop(target, None)

    def time_passes(self) -> None:
        if self._live is not None:
            return
        now = self._clock()
        for target, step in self._steps.items():
            patience_s = NEXT_WORD_S if step.said == step.name else FIRST_WORD_S
            if now - step.said_at >= patience_s:
                self._console.print(self._line(target), markup=False, highlight=False, soft_wrap=True)
                step.said, step.said_at = step.name, now

    def _line(self, target: Target) -> str:
        step = self._steps[target]
        so_far = format_duration(self._clock() - step.target_since)
        return f"{target.label}: {step.name}, {so_far} (limit: {self._limit} of processor time)"

    def _render(self) -> RenderableType:
        return Group(*(Text(self._line(target)) for target in self._steps))

    def __enter__(self) -> AnalysisDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
