"""Let a launch bind the attributes and variables that a step binds to what it made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from optimizations.capture.step.host_state import Rebound

_Kind = tuple[torch.Size, torch.dtype]


class BoundResults:
    """Hold the entries of a call, in the order of its results.

    What entries held and were bound to is let go of: all that counts is how what they held looked.
    """

    def __init__(self, entries: Sequence[Rebound] = ()):
        nothing = torch.empty(0, device="meta")
        self._entries = [replace(entry, old=None, new=nothing) for entry in entries]
        self._held = [None if entry.old is None else (entry.old.shape, entry.old.dtype) for entry in entries]
        self._kinds = list(dict.fromkeys(self._held))

    def __len__(self) -> int:
        return len(self._entries)

    def _now(self) -> list[Any]:
        """Return what the entries hold; one value where all hold the same."""
        held = [entry.container.get(entry.key) for entry in self._entries]
        return held[:1] if all(one is held[0] for one in held) else held

    def fit(self) -> bool:
        """Return whether each entry holds something of the kind it held.

        BERT binds one mask to an attribute of each layer, so one tensor is looked at once for each kind.
        """
        now = self._now()
        if len(now) == 1:
            return all(self._fits(now[0], kind) for kind in self._kinds)
        return all(map(self._fits, now, self._held))

    def _fits(self, now: Any, kind: _Kind | None) -> bool:
        """Return whether an entry fits. `kind`: of what it held before the recording: the step's code may check it."""
        if kind is None:
            return now is None
        return isinstance(now, torch.Tensor) and (now.shape, now.dtype) == kind

    def bind(self, results: tuple[Any, tuple[Any, ...]]) -> Any:
        """Bind the second of these, one for each entry; return the first, what the step returned."""
        returned, values = results
        for entry, value in zip(self._entries, values, strict=True):
            entry.container.put(entry.key, value)
        return returned
