"""Show the progress of `encore explain`: the step of each target, and how long it has taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from suite.explain.targets import Target
from suite.run.progress import FIRST_WORD_S, NEXT_WORD_S, format_duration


@dataclass(slots=True)
class _Step:
    name: str
    target_since: float
    said: str
    said_at: float


class AnalysisDisplay:
    """Print a line when a step of `encore explain` takes long, and again every half a minute, so that it never seems to
    hang without a word."""

    def __init__(self, console: Console, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._limit = format_duration(timeout_s)
        self._clock = clock
        self._steps: dict[Target, _Step] = {}

    def step(self, target: Target, step: str) -> None:
        now = self._clock()
        known = self._steps.setdefault(target, _Step(step, now, "", now))
        known.name = step

    def ended(self, target: Target) -> None:
        self._steps.pop(target, None)

    def time_passes(self) -> None:
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
