"""Whether inputs move: how often addresses differ from those of the call before."""

from __future__ import annotations

from collections.abc import Sequence

FEWEST_CALLS = 8
"""Comparisons before anything is said."""

MOVING_SHARE, RESTING_SHARE = 0.75, 0.25
"""Inputs move if they moved in this share of calls, and rest at or below that; in between it is as it was."""


class Movement:
    """Counts, from call to call."""

    def __init__(self) -> None:
        self._last: list[int] | None = None
        self._compared = 0
        self._moved = 0

    def note(self, addresses: Sequence[int]) -> None:
        """The addresses of one call's inputs."""
        if self._last is not None:
            self._compared += 1
            self._moved += self._last != list(addresses)
        self._last = list(addresses)

    def restart(self) -> None:
        """Forget all calls."""
        self._last, self._compared, self._moved = None, 0, 0

    @property
    def says_something(self) -> bool:
        """Whether there were enough calls."""
        return self._compared >= FEWEST_CALLS

    def moves(self, otherwise: bool) -> bool:
        """Whether inputs move; `otherwise` where that is neither here nor there."""
        if not self.says_something:
            return otherwise
        share = self._moved / self._compared
        return share >= MOVING_SHARE or (otherwise and share > RESTING_SHARE)
