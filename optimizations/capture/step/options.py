"""Check the options of a step: see `optimizations.graph_step`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from optimizations.capture.step.audit import CheckEvery
from optimizations.options import CONCURRENCY, Concurrency

DEFAULT_LIMIT = 8
HOST_DRAWS = ("refused", "unused")
"""Allowed values of `host_draws`."""
_ALLOWED = {
    "host_draws": HOST_DRAWS,
    "concurrency": ("off", "auto"),
    "on_change": ("raise", "warn"),
}


def require_one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Check that a setting has one of the values that are allowed.

    Raises:
        ValueError: the setting of this name has a value that is not one of those allowed.
    """
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; allowed are {', '.join(map(repr, allowed))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Hold the checked settings of one step.

    Raises:
        TypeError: a number is not a whole number.
        ValueError: a setting is not one of those allowed.
    """

    limit: int = DEFAULT_LIMIT
    host_draws: Literal["refused", "unused"] = "refused"
    key: Callable[[], Hashable] | None = None
    ignore: tuple[str, ...] = ()
    check_every: CheckEvery = "auto"
    on_change: Literal["raise", "warn"] = "raise"
    concurrency: Concurrency = CONCURRENCY

    def __post_init__(self) -> None:
        if type(self.limit) is not int:
            raise TypeError(f"limit={self.limit!r} must be a whole number, not {type(self.limit).__name__}")
        if self.limit < 1:
            raise ValueError(f"limit={self.limit}: at least one recording must be allowed")
        for name, allowed in _ALLOWED.items():
            require_one_of(name, getattr(self, name), allowed)
        if self.key is not None and not callable(self.key):
            raise TypeError(f"key={self.key!r} must be a function without arguments, as `key=lambda: trainer.phase`")
        if isinstance(self.ignore, str) or not all(isinstance(name, str) for name in self.ignore):
            raise TypeError(f"ignore={self.ignore!r} must be a tuple of names, as `ignore=('trainer.global_step',)`")
        every: Any = self.check_every
        if every not in (None, "auto") and (type(every) is not int or every < 1):
            raise ValueError(f"check_every={every!r}: give 'auto', a number of calls of at least 1, or None")
