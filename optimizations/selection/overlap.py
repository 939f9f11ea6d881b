"""What waiting for the device costs a program whose host would otherwise run ahead of it.

While calls are measured for latency, host and device take turns instead of working at the same time. So a few
iterations are left alone first, between two waits, and tell how long one takes without; iterations that are measured,
served the same way, are longer by what waiting costs.
"""

from __future__ import annotations

from collections import deque
from statistics import median

FREE = 8
"""Iterations that are left alone."""

FEWEST, MOST = 6, 64
"""Measured iterations before anything is said, and those that are remembered."""


class Overlap:
    """By the host's clock, in seconds.

    Attributes:
        free_s: how long an iteration took that nobody waited in; None before that is known.
    """

    def __init__(self) -> None:
        self.free_s: float | None = None
        self._began: float | None = None
        self._left = FREE
        self._measured: deque[float] = deque(maxlen=MOST)

    @property
    def leaves_alone(self) -> bool:
        """Whether the next iteration is to be left alone."""
        return self._left > 0

    def iteration_left_alone(self) -> bool:
        """One of them begins. Whether it is the first, before which the device is to be waited for."""
        self._left -= 1
        return self._left == FREE - 1

    def waited(self, now: float) -> None:
        """The device was waited for at an iteration's beginning: the first that is left alone, or any that is not."""
        if self._left == FREE - 1:
            self._began = now
        elif self.free_s is None and self._began is not None and not self._left:
            self.free_s = (now - self._began) / FREE

    def measured(self, seconds: float) -> None:
        """How long it took from the beginning of an iteration that was measured to that of the next one."""
        self._measured.append(seconds)

    def disturbed(self) -> None:
        """An iteration was not as the others are: begin again with those that are left alone."""
        if self.free_s is None:
            self._began, self._left = None, FREE

    @property
    def lost_s(self) -> float:
        """What one measured iteration takes longer, for being measured; 0 while that is not known."""
        if self.free_s is None or len(self._measured) < FEWEST:
            return 0.0
        return max(0.0, median(self._measured) - self.free_s)
