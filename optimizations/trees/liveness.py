"""Check whether the program still holds results of recordings, from counts of references.

Stock asks one result at a time, in Python. Where there are many, the counts that they have while none is live are kept,
and compared in few calls. A reference of C++ to a tensor shows in the count of its object of Python.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals.thread_state import in_a_new_thread

Reference = tuple[list[Any], int, list[Any], list[Any]]
"""To a result of a recording: a list of stock's references, the place in it, and at the same places stock's tensors and
the storages of these, as objects of Python."""

MANY = 4
"""More references than that are asked about together (`Many`)."""


_arrangement = 0
"""Counts how often the references that stock keeps became others. They may not, between two calls of one recording."""


def rearranged() -> None:
    """Callback: tensors that stock keeps were made or freed, or their references are counted in another way."""
    global _arrangement
    _arrangement += 1


class Many(list[Reference]):
    """Hold many references, of which a check one by one would take longer than the rest of a call.

    The counts from when no result was live are kept, for each recording; where the counts equal them, none is live.
    `rearranged` begins that again.
    """

    __slots__ = ("_arrangement", "_idle")

    def __init__(self, references: Sequence[Reference]) -> None:
        super().__init__(references)
        self._idle: list[tuple[tuple[Any, ...], Any]] = []  # what is counted, and the counts
        self._arrangement = -1

    def idle(self) -> bool:
        """Return whether it is certain that no result has a reference besides stock's."""
        return self._arrangement == _arrangement and all(_counts(*counted) == counts for counted, counts in self._idle)

    def are_idle(self) -> None:
        """Record that no result has a reference besides stock's."""
        recordings: dict[int, list[Reference]] = {}
        for one in self:
            recordings.setdefault(id(one[2]), []).append(one)
        self._idle = []
        for references in recordings.values():
            known = [(held[place], place) for held, place, _, _ in references if held[place] is not None]
            kept = [place for reference, place in known if reference.extra_ref_check is not None]
            cached, storages = references[0][2:]
            counted = [reference.ref for reference, _ in known], _picker(kept), cached, storages
            self._idle.append((counted, _counts(*counted)))
        self._arrangement = _arrangement


def _counts(weak: list[Any], pick: Callable[[list[Any]], list[Any]], cached: list[Any], storages: list[Any]) -> Any:
    """Return the counts of references to results: in C++, and of the objects of Python that stock keeps."""
    return (
        list(map(_storage_use_count, map(_cdata, weak))),
        list(map(sys.getrefcount, pick(cached))),
        list(map(sys.getrefcount, pick(storages))),
    )


def _picker(places: Sequence[int]) -> Callable[[list[Any]], list[Any]]:
    """Return a function that picks these places of a list."""
    if places and list(places) == list(range(places[0], places[-1] + 1)):
        return operator.itemgetter(slice(places[0], places[-1] + 1))
    return lambda values: [values[place] for place in places if place < len(values)]


_cdata = operator.attrgetter("cdata")


def any_alive(references: Sequence[Reference]) -> bool:
    """Return whether one of these references is to a live result."""
    many = type(references) is Many
    if many and references.idle():  # type: ignore[attr-defined]
        return False
    for held, place, cached, storages in references:
        reference = held[place]
        if reference is None:
            continue
        still_unused = reference.extra_ref_check
        # Where stock keeps the tensor, two references are its own; see `StorageWeakRefWrapper.expired`.
        if _storage_use_count(reference.ref.cdata) > (0 if still_unused is None else 2):
            return True
        if still_unused is None:
            continue
        # What only stock's list refers to needs no closer check, which takes longer.
        if (
            place < len(cached)
            and _references(cached, place) == _UNUSED
            and _references(storages, place) == _UNUSED_STORAGE
        ):
            continue
        if not still_unused():
            return True
    if many:
        references.are_idle()  # type: ignore[attr-defined]
    return False


def is_unreferenced(cached: list[Any], storages: list[Any], place: int) -> bool:
    """Return whether only this list refers to a tensor in it, in Python and C++, and only the other to its storage.

    A program that has nothing but the storage (`y.untyped_storage()`) keeps the memory alive, too. That does not show
    in the counts of C++: the object of Python is there as long as the storage, whether it is referenced or not.
    """
    return (
        _references(cached, place) == _UNUSED
        and _references(storages, place) == _UNUSED_STORAGE
        and torch_internals.tensor_use_count(cached[place]) == 1
    )


def _references(values: list[Any], place: int) -> int:
    return sys.getrefcount(values[place])


def _references_to_storage() -> int:
    held = torch.zeros(1, device="cpu")
    return _references([held.untyped_storage()], 0)


_storage_use_count = torch_internals.storage_use_count
_UNUSED = _references([object()], 0)
"""References to something that only a list refers to, as this Python counts them."""
_UNUSED_STORAGE = in_a_new_thread(_references_to_storage)
"""The same for the storage of a tensor, to whose object C++ refers as well."""
