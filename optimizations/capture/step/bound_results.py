"""Attributes and variables that a step binds to what it made: a launch binds them to its results."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from optimizations import host_code
from optimizations.capture.step.host_state import Rebound


class BoundResults:
    """The entries of a call, in the order of its results. `others` are the tensors that stood elsewhere, by id.

    What entries held and were bound to is let go of: all that counts is how what they held looked.
    """

    def __init__(self, entries: Sequence[Rebound] = (), others: Mapping[int, weakref.ref[torch.Tensor]] | None = None):
        self._entries = _without_memory(entries)
        self._olds = [entry.old for entry in self._entries]
        self._kinds = list({id(old): old for old in self._olds}.values())
        self._others = others or {}
        # An attribute is an entry of a dict, as a rule: compiled code reads and binds all of these in one call.
        in_dicts = bool(entries) and all(type(entry.container.held) is dict for entry in entries)
        compiled = host_code.looks() if in_dicts else None
        self._in_dicts: Any = None
        if compiled is not None:
            self._in_dicts = compiled.Bound(tuple([(entry.container.held, entry.key) for entry in entries]))

    def __len__(self) -> int:
        return len(self._entries)

    def _now(self) -> list[Any]:
        """What the entries hold; one value where all hold the same."""
        if self._in_dicts is not None:
            found: list[Any] = self._in_dicts()
            return found
        held = [entry.current() for entry in self._entries]
        return held[:1] if all(one is held[0] for one in held) else held

    def fit(self) -> bool:
        """Whether each entry holds something of the kind it held, and nothing that stands elsewhere.

        BERT binds one mask to an attribute of each layer, so one tensor is looked at once for each kind.
        """
        now = self._now()
        if len(now) == 1:
            return all(self._fits(now[0], old) for old in self._kinds)
        return all(map(self._fits, now, self._olds))

    def _fits(self, now: Any, old: torch.Tensor | None) -> bool:
        other = self._others.get(id(now))
        return is_such(now, old) and (other is None or other() is not now)

    def bind(self, results: tuple[Any, tuple[Any, ...]]) -> Any:
        """Bind the second of these, one for each entry; gives the first, what the step returned."""
        returned, values = results
        if self._in_dicts is not None:
            self._in_dicts(values)
        else:
            for entry, value in zip(self._entries, values, strict=True):
                entry.bind(value)
        return returned


def is_such(now: Any, old: torch.Tensor | None) -> bool:
    """Whether an entry holds something of the kind it held before the recording: its code may ask."""
    if old is None:
        return now is None
    return isinstance(now, torch.Tensor) and now.shape == old.shape and now.dtype == old.dtype


def _without_memory(entries: Iterable[Rebound]) -> list[Rebound]:
    """The entries, with stand-ins for what they held. What looks alike is one tensor."""
    alike: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def kind_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        kind = tensor.shape, tensor.dtype
        if kind not in alike:
            alike[kind] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return alike[kind]

    nothing = torch.empty(0, device="meta")
    return [replace(entry, old=kind_of(entry.old), new=nothing) for entry in entries]
