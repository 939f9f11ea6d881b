"""What waiting for the device costs a program whose host would otherwise run ahead of it.

While calls are measured for latency, host and device take turns instead of working at the same time. So a few
iterations are left alone before anything is measured, and again from time to time, each such window between two waits:
they tell how long one takes without. Iterations that are measured, served the same way, are longer by what waiting
costs. What one window says may be wrong, because the program did something else as well, or its host did.
"""

from __future__ import annotations

from collections import deque
from statistics import median

FREE = 8
"""Iterations of a window."""

AGAIN = 96
"""Iterations that are measured from one window to the next."""

FEWEST, MOST = 6, 64
"""Measured iterations before anything is said, and those that are remembered."""


class Overlap:
    """By the host's clock, in seconds."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._left = FREE
        self._windows: list[float] = []
        self._lost: list[float] = []
        self._measured: deque[float] = deque(maxlen=MOST)
        self._since = 0

    @property
    def leaves_alone(self) -> bool:
        """Whether the next iteration is to be left alone."""
        return self._left > 0

    @property
    def free_s(self) -> float | None:
        """How long an iteration took that nobody waited in, in the last window; None where there was none."""
        return self._windows[-1] if self._windows else None

    def iteration_left_alone(self) -> bool:
        """One of them begins. Whether it is the first, before which the device is to be waited for."""
        self._left -= 1
        return self._left == FREE - 1

    def waited(self, now: float) -> None:
        """The device was waited for at an iteration's beginning: the first that is left alone, or any that is not."""
        if self._left == FREE - 1:
            self._began = now
        elif self._began is not None and not self._left:
            self._end_window((now - self._began) / FREE)
            self._began = None

    def _end_window(self, free_s: float) -> None:
        if self._windows and len(self._measured) >= FEWEST:
            self._lost.append(median(self._measured) - (self._windows[-1] + free_s) / 2)
        self._windows.append(free_s)
        self._measured.clear()

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
            self._began, self._left = None, 0 if self._windows else FREE

    @property
    def lost_s(self) -> float:
        """What one measured iteration takes longer, for being measured; 0 while that is not known."""
        if self._lost:
            return max(0.0, median(self._lost))
        if not self._windows or len(self._measured) < FEWEST:
            return 0.0
        return max(0.0, median(self._measured) - self._windows[0])
