"""Tell whether the program still holds a gradient that a launch would overwrite, where eager leaves it as it is.

Note [Gradients that are held]. A launch writes the memory that its recording knows, whatever is in a `.grad` now. The
program may see that memory: it took `.grad` into a list, made a view of it, gave it to another parameter, or put a
tensor of its own there once and others since. So the references to these tensors and their storages are counted
(`torch_internals.reference_counts`). Encore holds some references itself. What each part of it takes is counted once,
when it is made (`OwnReferences`), for as long as it lives. Any count that this does not explain belongs to another
holder.

A recording may also write over gradients that another recording of the same pool left: that memory was free when it was
captured. So all gradients of its pool (`Family`) are counted, in one call for each recording. What the program holds of
a recording that is freed stays one of these, until it is held no more.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import numpy
import torch

from optimizations.capture.held_alone import is_plain
from optimizations.torch_internals.reference_counts import COUNTS, ReferenceCounts, unheld
from optimizations.uncollected import uncollected

Made = TypeVar("Made")

_own: dict[int, Any] = {}
"""What Encore holds, in counts: of a tensor by its identity, and of a storage by its address in C++. Two of each."""

_NONE: Any = numpy.zeros(2, dtype=numpy.int32)
"""Where it holds nothing."""

_changes = itertools.count(1)
_last_change = [0]
"""Its number stands for what is in `_own`."""

_asked_by: dict[int, weakref.ref[Family]] = {}
"""Who compares the counts of these with what they should be."""

TRIALS = 2
"""Times that something is made to see what it holds, where another thread may take something meanwhile."""

NOWHERE: Mapping[int, int] = MappingProxyType({})


class OwnReferences:
    """Count references that a part of Encore holds, which lives at least as long as this. `added` is as in `_own`."""

    def __init__(self, added: Mapping[int, Any]) -> None:
        self._added = {key: some for key, some in added.items() if some.any()}
        for key, some in self._added.items():
            _own[key] = _own.get(key, _NONE) + some
            _tell(key)
        _changed()

    def of_others(self, others: Mapping[int, torch.Tensor]) -> OwnReferences:
        """Return as many to tensors that took the places of these. `others`: the new ones by identities of the old."""
        added = {id(others[key]) if key in others else key: some for key, some in self._added.items()}
        self.release()
        return OwnReferences(added)

    def release(self) -> None:
        """Take these references out of the counts: they are about to go."""
        for key, some in self._added.items():
            _tell(key)
            if (left := _own.pop(key, some) - some).any():
                _own[key] = left
            else:
                _asked_by.pop(key, None)
        self._added = {}
        _changed()

    __del__ = release


def _changed() -> None:
    """Note a change of `_own`, after it: what was computed meanwhile counts as computed before it."""
    _last_change[0] = next(_changes)


def _tell(key: int) -> None:
    """Tell the family that compares this that Encore holds it another number of times than before."""
    if (asked := _asked_by.get(key)) is not None and (family := asked()) is not None:
        family.forget()


def _keys(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    return [(id(one), one.untyped_storage()._cdata) for one in tensors]


def taken_by(
    make: Callable[[], Made], tensors: Sequence[torch.Tensor], trial: Callable[[], object] | None = None
) -> tuple[Made, OwnReferences]:
    """Return what `make` gives, and what it holds of these tensors.

    No garbage is collected meanwhile: what the program held by it would be missing for ever. And what another thread
    takes meanwhile would count as Encore's for ever, and be overwritten. So where there is one, the same is made some
    times more, by `trial` if `make` changes anything, and thrown away. What is not taken each time is not Encore's.
    """
    with uncollected():
        counts = ReferenceCounts(tensors)
        trials = [_taken(counts, trial or make)[1] for _ in range(TRIALS if _has_other_threads() else 0)]
        made, last = _taken(counts, make)
        added = functools.reduce(numpy.minimum, trials, last).reshape(-1, 2, 2)
    found = {
        key: some
        for keys, both in zip(_keys(tensors), added, strict=True)
        for key, some in zip(keys, both, strict=True)
    }
    return made, OwnReferences(found)


def _taken(counts: ReferenceCounts, make: Callable[[], Made]) -> tuple[Made, Any]:
    before = counts.now()
    made = make()
    return made, counts.now() - before


def _has_other_threads() -> bool:
    """Return whether Python runs threads other than this one, which `threading` may not know."""
    return len(sys._current_frames()) > 1


def plain(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return those whose references can be counted, each once."""
    return list({id(one): one for one in tensors if is_plain(one)}.values())


class Holders:
    """Count the references to these tensors. It holds each of them once, and its storage."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self._counts = ReferenceCounts(self.tensors)
        self.now, self.compared = self._counts.now, self._counts.compared
        self.keys = _keys(self.tensors)
        self._lie = [(one.dtype, one.storage_offset(), one.shape, one.stride()) for one in self.tensors]
        self._starts = [one.data_ptr() for one in self._counts.storages]
        shared = Counter(storage for _, storage in self.keys)
        self._alone: Any = None
        self._reckoned_at = 0
        self._sharing = numpy.array([shared[storage] - 1 for _, storage in self.keys], dtype=numpy.int32)

    def of_others(self, others: Mapping[int, torch.Tensor]) -> Holders:
        """Return the same for tensors that have taken the places of these, by the identities of these."""
        return Holders([others.get(id(one), one) for one in self.tensors])

    def memory(self, index: int) -> torch.Tensor:
        """Return a tensor of its own where one of these lay, also if that has moved since."""
        dtype, *lies = self._lie[index]
        storage = self._counts.storages[index]
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *lies)

    def lying(self, index: int) -> torch.Tensor:
        """Return this one, if it lies where it lay; else `memory`: the program may hold that apart from it."""
        tensor = self.tensors[index]
        return tensor if tensor.untyped_storage()._cdata == self.keys[index][1] else self.memory(index)

    def lasts(self, index: int) -> bool:
        """Return whether that memory is where it was: what the program gave back (`resize_`) is not held."""
        return self._counts.storages[index].data_ptr() == self._starts[index]

    def expected(self, standing: Mapping[int, int]) -> Any:
        """Return the counts where only Encore holds these, and `standing` tells in how many `.grad` each is."""
        _, in_a_grad, in_another = unheld()
        found = self._in_no_grad().copy()
        if standing:
            times = numpy.array([standing.get(tensor, 0) for tensor, _ in self.keys], dtype=numpy.int32)
            there = numpy.minimum(times, 1)
            found += numpy.outer(there, in_a_grad) + numpy.outer(times - there, in_another)
        return found.reshape(-1)

    def _in_no_grad(self) -> Any:
        """Return the counts where only Encore holds these. They are computed again when it holds others than before."""
        if self._reckoned_at != (now := _last_change[0]):
            own = [_own.get(key, _NONE) for keys in self.keys for key in keys]
            found = numpy.array(own, dtype=numpy.int32).reshape(-1, COUNTS) + unheld()[0]
            found[:, 2] += self._sharing
            self._alone, self._reckoned_at = found, now
        return self._alone

    def cells(self, tensors: Collection[int]) -> set[int]:
        """Return the addresses of the storages of these, given by their identities."""
        return {cell for one, cell in self.keys if one in tensors}

    def held(self, standing: Mapping[int, int] = NOWHERE) -> set[int]:
        """Return the identities of those that anything but Encore holds."""
        if not self.tensors:
            return set()
        differs = (self.now() != self.expected(standing)).reshape(-1, COUNTS).any(axis=1)
        return {id(self.tensors[index]) for index in numpy.flatnonzero(differs)}


class Left:
    """Track the gradients that a recording made itself and leaves, and who holds them. `stand` is what `stands` calls.

    `standing`: in how many `.grad` each is then, by its identity.
    """

    def __init__(
        self, holders: Holders, standing: Mapping[int, int], stand: weakref.WeakMethod[Callable[[], bool]]
    ) -> None:
        self.holders, self.standing, self._stand = holders, standing, stand
        self.join(Family())

    def of_others(self, others: Mapping[int, torch.Tensor]) -> Left:
        """Return the same for tensors that have taken the places of these."""
        standing = {id(others[key]) if key in others else key: times for key, times in self.standing.items()}
        made = Left(self.holders.of_others(others), standing, self._stand)
        made.join(self.family)
        return made

    def stands(self) -> bool:
        """Return whether each is in the `.grad` where the recording leaves it."""
        stand = self._stand()
        return stand is not None and stand()

    def join(self, family: Family) -> None:
        """Join the family of those whose recordings share a pool."""
        self.family = family
        family.add(self)

    def outlive(self) -> None:
        """Pass what the program holds of it to the others of its family: its recording is about to be freed."""
        cells = self.holders.cells(self.holders.held())
        found = [
            self.holders.lying(index)
            for index, (_, cell) in enumerate(self.holders.keys)
            if cell in cells and self.holders.lasts(index)
        ]
        if found:
            holders, own = taken_by(lambda: Holders(found), found)
            self.family.keep(Left(holders, {}, self._stand), own)


_Known = tuple[weakref.ref[Left], Callable[[], Any], bytes, bytes]
"""What a recording left, the function that gives the counts, and these without and with each in its `.grad`."""


@dataclass(frozen=True, slots=True)
class _Usual:
    """Keep the counts of a family's only member in the call before, when only Encore held any.

    `same` tells whether they are that again. `stood`: the member, if each was in its `.grad`. `known_at`: what
    `_last_change` was before they were reckoned.
    """

    same: Callable[[], bool]
    stood: weakref.ref[Left] | None
    known_at: int

    def holds(self, stands: Left | None) -> bool:
        """Return whether only Encore holds any now. Where it does not tell, they are counted."""
        if self.known_at != _last_change[0] or (self.stood is not None and self.stood() is not stands):
            return False
        return self.same()


def _forget(family: weakref.ref[Family], gone: object) -> None:
    if (found := family()) is not None:
        found.forget()


class Family:
    """Hold what the recordings of one pool leave."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[Left]] = []
        self._outlived: list[tuple[Left, OwnReferences]] = []
        self._known: Sequence[_Known] | None = None
        self._usual: _Usual | None = None
        self._unusual = 0

    def add(self, left: Left) -> None:
        self._members.append(weakref.ref(left, functools.partial(_forget, weakref.ref(self))))
        self.forget()
        for keys in left.holders.keys:
            _asked_by.update(dict.fromkeys(keys, weakref.ref(self)))

    def forget(self) -> None:
        """Forget what the counts should be: Encore holds others than before, or something is gone."""
        self._known = self._usual = None

    def keep(self, left: Left, own: OwnReferences) -> None:
        """Keep what a recording left that is freed, and what this holds of it, until only Encore holds it."""
        self.add(left)
        self._outlived.append((left, own))

    def members(self) -> list[Left]:
        """Return those that left something."""
        if self._outlived:
            self._outlived = [(left, own) for left, own in self._outlived if left.holders.held()]
        self._members = [one for one in self._members if one() is not None]
        return [left for one in self._members if (left := one()) is not None and left.holders.tensors]

    def _settled(self) -> Sequence[_Known]:
        """Return what the counts should be, by what Encore holds now."""
        known = []
        for left in self.members():
            both = [left.holders.expected(some).tobytes() for some in (NOWHERE, left.standing)]
            known.append((weakref.ref(left), left.holders.now, both[0], both[1]))
        self._known = known
        return known

    def unheld(self, stands: Left | None) -> bool:
        """Return whether only Encore holds any.

        Those of a recording are all in their `.grad`, as those of one that `stands` are known to be, or none is.
        """
        if self._outlived:
            self.members()
        if (usual := self._usual) is not None and usual.holds(stands):
            return True
        known_at = _last_change[0]
        known = self._known or self._settled()
        for reference, now, absent, standing in known:
            if (found := now().tobytes()) == absent:
                continue
            if found != standing or (left := reference()) is None:
                return False
            if left is not stands and not left.stands():
                return False
        self._unusual += 1
        if len(known) == 1 and self._unusual & (self._unusual - 1) == 0:  # it takes as long as many calls
            ((reference, _, _, standing),) = known
            stood = found == standing
            if self._known is known and (left := reference()) is not None and (not stood or left is stands):
                counts = left.holders.expected(left.standing if stood else NOWHERE)
                self._usual = _Usual(left.holders.compared(counts), reference if stood else None, known_at)
        return True
