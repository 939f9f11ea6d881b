"""Check whether the program still references results of recordings, by reference counts.

Stock checks one result at a time, in Python. For many results, the counts from a time when none was live are stored and
compared in few calls. A reference from C++ to a tensor shows in the count of its Python object.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from optimizations import torch_internals
from optimizations.torch_internals.geometry import picker

T = TypeVar("T")

Reference = tuple[list[Any], int, list[Any], list[Any]]
"""A reference to a result of a recording: a list of stock's references, the position in it, and lists with stock's
tensors and their storages at the same positions, as Python objects."""

MANY = 4
"""More references than this are checked together (`Many`)."""


def apart_from_the_program(do: Callable[[], T]) -> T:
    """Call `do` without the program's modes, transforms and inference mode, and outside of other operators.

    No mode sees its operators. Leaving inference mode brings back autograd also where an operator's kernel is without.
    Hooks of saved tensors stay.

    Note [Guards and interrupts]. Settings of a thread are switched by guards in C that stand in a `with` statement
    themselves, or in a `try` whose `finally` puts them back. A signal is handled after a call and when a function of
    Python begins. So `with torch.inference_mode(False)` may end between the guard, which is in an attribute of the
    context manager then, and the block. The guard is left when the traceback goes, whenever that is, and puts back what
    was there before: gradients are off from then on if the interrupted call was inside of autograd.
    """
    with torch_internals.disable_torch_function(), torch_internals.InferenceMode(False):
        if not torch_internals.len_torch_dispatch_stack() and not torch_internals.are_functorch_transforms_active():
            return do()
        with torch_internals.clear_functorch_levels(), torch_internals.disable_current_modes():
            return do()


_arrangement = 0
"""Counts changes of the references that stock keeps. After a change, counts stored before it are invalid."""


def rearranged() -> None:
    """Callback: tensors that stock keeps were made or freed, or the way their references are counted changed."""
    global _arrangement
    _arrangement += 1


class Many(list[Reference]):
    """Hold many references, which take too long to check one by one.

    The counts from a time when no result was live are stored for each recording. If the counts equal them, none is
    live. `rearranged` discards them.
    """

    __slots__ = ("_arrangement", "_idle")

    def __init__(self, references: Sequence[Reference]) -> None:
        super().__init__(references)
        self._idle: list[tuple[tuple[Any, ...], Any]] = []  # the counted objects and their counts
        self._arrangement = -1

    def idle(self) -> bool:
        """Return whether the counts prove that no result has a reference besides stock's."""
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
            counted = [reference.ref for reference, _ in known], picker(kept), cached, storages
            self._idle.append((counted, _counts(*counted)))
        self._arrangement = _arrangement


def _counts(weak: list[Any], pick: Callable[[Any], tuple[Any, ...]], cached: list[Any], storages: list[Any]) -> Any:
    """Return the reference counts of results: in C++, and of the Python objects that stock keeps."""
    return (
        list(map(_storage_use_count, map(_cdata, weak))),
        list(map(sys.getrefcount, pick(cached))),
        list(map(sys.getrefcount, pick(storages))),
    )


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
        # If stock keeps the tensor, two of the references are stock's; see `StorageWeakRefWrapper.expired`.
        if _storage_use_count(reference.ref.cdata) > (0 if still_unused is None else 2):
            return True
        if still_unused is None:
            continue
        # A result that only stock's list references needs no closer check, which takes longer.
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
    """Return whether only `cached` references its tensor, in Python and C++, and only `storages` its storage.

    A program that only has the storage (`y.untyped_storage()`) keeps the memory alive, too. The counts in C++ do not
    show this: the storage's Python object lives as long as the storage, whether it is referenced or not.
    """
    return (
        _references(cached, place) == _UNUSED
        and _references(storages, place) == _UNUSED_STORAGE
        and _tensor_use_count(cached[place]) == 1
    )


def _references(values: list[Any], place: int) -> int:
    return sys.getrefcount(values[place])


def _references_to_storage() -> int:
    held = torch.zeros(1, device="cpu")
    return _references([held.untyped_storage()], 0)


_storage_use_count, _tensor_use_count = torch_internals.storage_use_count, torch_internals.tensor_use_count
_UNUSED = _references([object()], 0)
"""The reference count of an object that only a list references, in this Python version."""
_UNUSED_STORAGE = apart_from_the_program(_references_to_storage)
"""The same for the Python object of a tensor's storage, which C++ references as well."""
