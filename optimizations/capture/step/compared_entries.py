"""Entries of dicts, lists and cells, compared in bulk by what Python runs in C."""

from __future__ import annotations

import operator
import types
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from optimizations.capture.signature import exact
from optimizations.capture.step.watched_entries import Cell, as_readable, is_number

_cell_content = operator.attrgetter("cell_contents")


class Entries:
    """Entries of dicts, lists and cells, compared in bulk: numbers by value, objects by identity."""

    def __init__(self) -> None:
        self._views: list[Iterable[Any]] = []
        self._members: list[Any] = []
        self._owners: list[Any] = []
        self._keys: list[Any] = []
        self._single: list[Any] = []
        self._cells: list[types.CellType] = []
        self._in_cells: list[Any] = []
        self._sized: list[Any] = []
        self._sizes: list[int] = []
        self._by_keys: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}

    def add(self, owner: Any, watched: Sequence[tuple[Any, Any]], *, may_view: bool, sized: Any) -> None:
        """Look at these entries of `owner` from now on, and at the size of `sized` if it is not None."""
        if isinstance(owner, Cell) and watched and not is_number(watched[0][1]):
            self._cells.append(owner.cell)
            self._in_cells.append(watched[0][1])
            return
        readable = as_readable(owner)
        if numbers := [(key, value) for key, value in watched if is_number(value)]:
            keys = tuple([key for key, _ in numbers])
            owners, values = self._by_keys.setdefault(keys, ([], []))
            owners.append(readable)
            values.append(numbers[0][1] if len(numbers) == 1 else tuple([value for _, value in numbers]))
        objects = [(key, value) for key, value in watched if not is_number(value)]
        if objects and may_view and len(objects) == len(owner):
            self._views.append(owner.values() if isinstance(owner, dict) else owner)
            self._members += [value for _, value in objects]
        else:
            self._owners += [readable] * len(objects)
            self._keys += [key for key, _ in objects]
            self._single += [value for _, value in objects]
        if sized is not None:
            self._sized.append(sized)
            self._sizes.append(len(sized))

    def freeze(self) -> None:
        """Nothing more is added."""
        self.empty = not any((self._views, self._single, self._cells, self._sized, self._by_keys))
        self._numbers = [
            (operator.itemgetter(*keys), owners, values) for keys, (owners, values) in self._by_keys.items()
        ]

    def unchanged(self) -> bool:
        """Whether numbers and sizes are as they were, and the same objects stand in the same places."""
        for getter, owners, values in self._numbers:
            now = list(map(getter, owners))
            if all(map(operator.is_, now, values)):
                continue
            try:
                if list(map(exact, now)) != list(map(exact, values)):  # a NaN equals none, not even itself
                    return False
            except Exception:  # something that cannot be compared stands there now, as an array: it is another value
                return False
        return list(map(len, self._sized)) == self._sizes and self.objects_stand()

    def objects_stand(self) -> bool:
        """Whether the same objects stand in the same places."""
        if self._views:
            members = list(chain.from_iterable(self._views))
            if len(members) != len(self._members) or not all(map(operator.is_, members, self._members)):
                return False
        if self._owners and not all(map(operator.is_, map(operator.getitem, self._owners, self._keys), self._single)):
            return False
        return not self._cells or all(map(operator.is_, map(_cell_content, self._cells), self._in_cells))

    def other_sizes(self) -> list[int]:
        """The sizes that are not as they were."""
        sizes = map(len, self._sized)
        return [now for now, then in zip(sizes, self._sizes, strict=True) if now != then]
