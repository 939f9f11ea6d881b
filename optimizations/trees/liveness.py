"""Checks whether the program still holds results of recordings, from counts of references.

Stock asks one result at a time, in Python. Where there are many, the counts that they have while nobody holds any are
kept, and compared in few calls.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals.apart import in_a_new_thread

Reference = tuple[list[Any], int, list[Any], list[Any]]
"""To a result of a recording: a list of stock's references, the place in it, and at the same places stock's tensors and
the storages of these, as objects of Python."""

MANY = 4
"""More references than that are asked about together (`Many`)."""


class Many(list[Reference]):
    """So many references that asking one by one takes longer than all else of a call.

    The counts are kept that were there when nobody held any result; where they are those, nobody does. `rearranged`
    begins that again.
    """

    __slots__ = ("_arrangement", "_idle")

    def __init__(self, references: Sequence[Reference]) -> None:
        super().__init__(references)
        self._idle: list[Idle] | None = None
        self._arrangement = 0

    def idle(self) -> bool:
        """Whether it is plain that nobody holds any."""
        found = self._idle
        return found is not None and self._arrangement == _arrangement and all(map(Idle.stand, found))

    def are_idle(self) -> None:
        """To be told that nobody holds any."""
        self._idle, self._arrangement = Idle.of(self), _arrangement


_arrangement = 0
"""Counts how often the references that stock keeps became others. They may not, between two calls of one recording."""


def rearranged() -> None:
    """To be called when tensors that stock keeps were made or let go, or their references are counted otherwise."""
    global _arrangement
    _arrangement += 1


class Idle:
    """Counts of references to results of one recording while nobody holds them."""

    __slots__ = ("_cached", "_objects", "_pick", "_storage_counts", "_storages", "_tensor_counts", "_weak")

    def __init__(self, references: Sequence[Reference]) -> None:
        known = [(held[place], place) for held, place, _, _ in references if held[place] is not None]
        kept = [place for reference, place in known if reference.extra_ref_check is not None]
        self._weak = [reference.ref for reference, _ in known]
        self._cached, self._objects = references[0][2:]
        self._pick = _picker(kept)
        self._storages = list(map(_storage_use_count, map(_cdata, self._weak)))
        self._tensor_counts = list(map(sys.getrefcount, self._pick(self._cached)))
        self._storage_counts = list(map(sys.getrefcount, self._pick(self._objects)))

    @staticmethod
    def of(references: Sequence[Reference]) -> list[Idle]:
        """By recording."""
        found: dict[int, list[Reference]] = {}
        for one in references:
            found.setdefault(id(one[2]), []).append(one)
        return [Idle(some) for some in found.values()]

    def stand(self) -> bool:
        """Whether the counts are these still."""
        return (
            list(map(_storage_use_count, map(_cdata, self._weak))) == self._storages
            and list(map(sys.getrefcount, self._pick(self._cached))) == self._tensor_counts
            and list(map(sys.getrefcount, self._pick(self._objects))) == self._storage_counts
        )


def _picker(places: Sequence[int]) -> Callable[[list[Any]], list[Any]]:
    """What picks these places of a list."""
    if places and list(places) == list(range(places[0], places[-1] + 1)):
        return operator.itemgetter(slice(places[0], places[-1] + 1))
    return lambda values: [values[place] for place in places if place < len(values)]


_cdata = operator.attrgetter("cdata")


def any_alive(references: Sequence[Reference]) -> bool:
    """Whether one of these references is to a result that somebody holds."""
    many = type(references) is Many and _HOLDERS_ARE_COUNTED
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
        # What nobody but stock's list refers to needs no closer look, which takes longer.
        if (
            _HOLDERS_ARE_COUNTED
            and place < len(cached)
            and _references(cached, place) == _UNUSED
            and _references(storages, place) == _UNUSED_STORAGE
        ):
            continue
        if not still_unused():
            return True
    if many:
        references.are_idle()  # type: ignore[attr-defined]
    return False


def nobody_holds(cached: list[Any], storages: list[Any], place: int) -> bool:
    """Whether only this list refers to a tensor in it, in Python and in C++, and only the other one to its storage.

    Who has nothing but the storage (`y.untyped_storage()`) holds the memory, too. That does not show in the counts of
    C++: the object of Python is there as long as the storage, whether somebody refers to it or not.
    """
    return (
        _references(cached, place) == _UNUSED
        and _references(storages, place) == _UNUSED_STORAGE
        and torch_internals.tensor_use_count(cached[place]) == 1
    )


def _references(values: list[Any], place: int) -> int:
    return sys.getrefcount(values[place])


def _holders_are_counted() -> bool:
    """Whether what holds a tensor in C++ shows in the references to its Python object."""
    held = [torch.zeros(1, device="cpu")]
    before = _references(held, 0)
    product = torch.ones(1, device="cpu", requires_grad=True) * held[0]  # saves it for a backward
    counted = _references(held, 0) > before
    del product
    return counted


def _references_to_storage() -> int:
    held = torch.zeros(1, device="cpu")
    return _references([held.untyped_storage()], 0)


_storage_use_count = torch_internals.storage_use_count
_UNUSED = _references([object()], 0)
"""References to something that only a list refers to, as this Python counts them."""
_UNUSED_STORAGE = in_a_new_thread(_references_to_storage)
"""The same for the storage of a tensor, to whose object C++ may refer as well."""
_HOLDERS_ARE_COUNTED = in_a_new_thread(_holders_are_counted)
