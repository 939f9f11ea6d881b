"""What waiting for the device costs a program whose host would otherwise run ahead of it.

While calls are measured for latency, host and device take turns instead of working at the same time. So a few
iterations are left alone before anything is measured, and again from time to time, each such window between two waits:
they tell how long one takes without. Iterations that are measured, served the same way, are longer by what waiting
costs. What one window says may be wrong, because the program did something else as well, or its host did.

Note [Pauses]. A program writes a log or evaluates after every tenth iteration, say. Most windows have such a pause in
them, and the median of measured iterations has none, so that nothing would seem to be lost. An iteration of a window
after which the host comes back later than a measured one takes, waits included, had a pause: it counts as long as the
others of its window.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

FREE = 8
"""Iterations of a window."""

AGAIN = 96
"""Iterations that are measured from one window to the next."""

FEWEST, MOST = 6, 64
"""Measured iterations before anything is said, and those that are remembered."""

MOST_SPOILED = 8
"""First windows that calls in another order spoil, one after another, before measuring begins without one. A program
that evaluates after every fifth iteration, say, would never be measured."""

PAUSE = 1.5
"""Times the median of measured iterations. Note [Pauses]."""


@dataclass(frozen=True, slots=True)
class Window:
    """Iterations that were left alone: `seconds` from the wait before to the wait behind them, and from each one's
    beginning to the next one's."""

    seconds: float
    between: tuple[float, ...]

    def iteration_s(self, measured_s: float = math.inf) -> float:
        """How long one took, pauses left out where it is known how long measured ones take."""
        late = [one for one in self.between if one > PAUSE * measured_s]
        pauses = sum(late) - len(late) * median(self.between) if late else 0.0
        return (self.seconds - pauses) / FREE


class Overlap:
    """By the host's clock, in seconds."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._left = FREE
        self._last = 0.0
        self._between: list[float] = []
        self._windows: list[Window] = []
        self._lost: list[float] = []
        self._measured: deque[float] = deque(maxlen=MOST)
        self._since = 0
        self._spoiled = 0

    @property
    def leaves_alone(self) -> bool:
        """Whether the next iteration is to be left alone."""
        return self._left > 0

    @property
    def free_s(self) -> float | None:
        """How long an iteration took that nobody waited in, in the last window; None where there was none."""
        return self._windows[-1].iteration_s() if self._windows else None

    def begins(self, now: float) -> None:
        """To be told of each iteration's beginning, before anybody waits."""
        if self._began is not None:
            self._between.append(now - self._last)
            self._last = now

    def iteration_left_alone(self) -> bool:
        """One of them begins. Whether it is the first, before which the device is to be waited for."""
        self._left -= 1
        return self._left == FREE - 1

    def waited(self, now: float) -> None:
        """The device was waited for at an iteration's beginning: the first that is left alone, or any that is not."""
        if self._left == FREE - 1:
            self._began = self._last = now
            self._between.clear()
        elif self._began is not None and not self._left:
            self._end_window(Window(now - self._began, tuple(self._between)))
            self._began = None

    def _end_window(self, window: Window) -> None:
        if self._windows and len(self._measured) >= FEWEST:
            self._lost.append(self._lost_beside(self._windows[-1], window))
        self._windows.append(window)
        self._measured.clear()

    def _lost_beside(self, *windows: Window) -> float:
        """By measured iterations, compared with those of the windows around them."""
        measured_s = median(self._measured)
        return measured_s - sum(one.iteration_s(measured_s) for one in windows) / len(windows)

    def iteration_measured(self) -> None:
        """One more iteration was somebody's turn."""
        self._since += 1
        if self._since >= AGAIN:
            self._since, self._left = 0, FREE

    def measured(self, seconds: float) -> None:
        """How long it took, served as those that are left alone, from its beginning to that of the next one."""
        self._measured.append(seconds)

    def disturbed(self) -> None:
        """An iteration was not as the others are: of a window it spoils all."""
        if self._left or self._began is not None:
            self._spoiled += self._began is not None
            self._began, self._left = None, 0 if self._windows or self._spoiled >= MOST_SPOILED else FREE

    @property
    def lost_s(self) -> float:
        """What one measured iteration takes longer, for being measured; 0 while that is not known."""
        if self._lost:
            return max(0.0, median(self._lost))
        if not self._windows or len(self._measured) < FEWEST:
            return 0.0
        return max(0.0, self._lost_beside(self._windows[0]))
