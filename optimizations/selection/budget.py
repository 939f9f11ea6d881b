"""What measuring may cost: a share of the time that compiling took, for all groups of a compilation together.

What counts is not the time of the calls that were measured, which the program makes anyway, but how much longer they
took than they would have with the fastest candidate.
"""

from __future__ import annotations

from collections.abc import Sequence

from optimizations.selection.settings import Settings

SHARE = 0.2
"""Of the time that compiling took."""


def total_s(settings: Sequence[Settings]) -> float | None:
    """What all groups of these compilations may cost together; None where it is not known how long they took."""
    compile_s = sum(one.compile_s for one in settings)
    return SHARE * compile_s if compile_s else None


class Budget:
    """Of one group, and what was charged to it so far."""

    def __init__(self) -> None:
        self._charged_s = 0.0
        self._charged_to: Settings | None = None

    def begin(self, settings: Sequence[Settings], groups: int) -> float | None:
        """What a group may cost more than was charged to it: its part of what is left, which `groups` share."""
        self._charged_to = settings[0]
        total = total_s(settings)
        if total is None:
            return None
        return (total - sum(one.excess_s for one in settings)) / max(1, groups)

    def take_over(self, other: Budget) -> None:
        """What was charged to another group, which is one with this now."""
        self._charged_s += other._charged_s
        self._charged_to = self._charged_to or other._charged_to

    def charge(self, excess_s: float) -> None:
        """To be told what the group has cost, all in all."""
        if self._charged_to is not None:
            self._charged_to.excess_s += max(0.0, excess_s - self._charged_s)
            self._charged_s = max(excess_s, self._charged_s)
