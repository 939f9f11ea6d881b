"""Compare what attributes and variables hold that the calls of a callable bind to other tensors.

A callable may ask what stands there before it binds it: `if self.hidden is None`, or whether it has the shape of the
batch. So a graph serves where a value of the kind stands there that stood there when it was captured, and where nothing
was bound yet if the first run of the callable did the same as the others.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from optimizations.capture.step.host_state import Container, Entry, HostState, Rebound, Scope, Slots, entries_of

_ABSENT = object()
_NOTHING: Hashable = "nothing"


class Outset:
    """Hold what stood in the containers of a callable before its first run. `content` is a snapshot of `state`."""

    def __init__(self, state: HostState, content: Sequence[Any]) -> None:
        self._content = {
            id(container.held): dict(entries_of(container, held))
            for container, held in zip(state.containers, content, strict=True)
        }

    def of(self, entry: Entry) -> Any:
        """Return what the entry held; `_ABSENT` for nothing. If its container came later, return what it holds now."""
        held = entry.container.held
        if id(held) not in self._content:
            return _value(entry)
        return self._content[id(held)].get(entry.key, _ABSENT)


class Binding:
    """Hold the entries that a graph's calls bind, as they were before its capture and before the first run.

    `as_first`: whether the first run did the same as the others.
    """

    def __init__(
        self, entries: Sequence[Rebound] = (), outset: Outset | None = None, *, as_first: bool = False
    ) -> None:
        self._entries = [Entry(entry.container, entry.key) for entry in entries]
        self._first = [] if outset is None else [outset.of(entry) for entry in self._entries]
        self._kinds = [{_kind(entry.old)} for entry in entries]
        if as_first:
            for kinds, value in zip(self._kinds, self._first, strict=True):
                kinds.add(_kind(value))

    @property
    def name(self) -> str:
        """Return the name of an entry that holds something of another kind now."""
        found = next(entry for entry, kinds in zip(self._entries, self._kinds, strict=True) if not _is(entry, kinds))
        path = found.container.path.removeprefix(".")
        return path if found.key is None else f"{path}.{found.key}"

    def fits(self) -> bool:
        """Return whether the entries hold values of these kinds."""
        return all(_is(entry, kinds) for entry, kinds in zip(self._entries, self._kinds, strict=True))

    def put_back(self) -> None:
        """Let the entries hold what they held before the first run."""
        for entry, value in zip(self._entries, self._first, strict=True):
            if value is _ABSENT and _is_dict(entry.container):
                entry.container.held.pop(entry.key, None)
            elif value is not _ABSENT and not isinstance(value, types.CellType):  # that is what an empty one holds
                entry.bind(value)
        self._first = []


def added_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries of dicts that have nothing under these keys."""
    return [entry for entry in entries if _value(entry) is _ABSENT]


@contextlib.contextmanager
def filled(entries: Sequence[Entry]) -> Iterator[None]:
    """Fill these entries of dicts in the block, and remove them after it."""
    for entry in entries:
        entry.bind(torch.empty(0, device="cpu"))
    try:
        yield
    finally:
        for entry in entries:
            entry.container.held.pop(entry.key, None)


def _is(entry: Entry, kinds: set[Hashable]) -> bool:
    return _kind(_value(entry)) in kinds


def _value(entry: Entry) -> Any:
    value = entry.current()
    return _ABSENT if value is None and _is_dict(entry.container) and entry.key not in entry.container.held else value


def _is_dict(container: Container) -> bool:
    return isinstance(container.held, dict) and not isinstance(container.held, (Scope, Slots, types.CellType))


def _kind(value: Any) -> Hashable:
    """Return what code can tell of a value without reading what a tensor holds."""
    if value is _ABSENT:
        return _NOTHING
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return None if value is None else id(value)
