"""Tell whether the program holds a gradient whose memory graphs write.

Note [Gradients that are held]. A launch writes its gradients where the recording had them, whatever is in a `.grad`
now. The program may see that memory: it took `.grad` into a list, or made a view of it. So the references to these
tensors and to their storages are counted before a launch. Encore refers to each gradient that its graphs know through
one object alone (`own`), in whichever recording, so the counts of one that only Encore holds are always the same.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch

from optimizations import torch_internals
from optimizations.capture.inputs import have_no_other_reference
from optimizations.torch_internals.reference_counts import ReferenceCounts

TURNS = 8
"""Comparisons in which views and addresses of all gradients are compared, where there are many."""
FEW = 32
"""Gradients of which so many are compared each time at least."""

Counts = tuple[int, ...]
Owned = tuple["GradientReferences", int]
"""Gradients that Encore holds once, and which of these."""

_owners: dict[int, tuple[weakref.ref[GradientReferences], int]] = {}
"""Who holds a gradient, by its identity."""


class GradientReferences:
    """Hold gradients once each, with their storages, and count who else holds them.

    Attributes:
        tensors: the gradients.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._counts = ReferenceCounts(tensors)
        self.tensors = self._counts.tensors
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]
        times = Counter(self._counts.cells)
        self._sharing = [times[cell] - 1 for cell in self._counts.cells]
        self._all = list(range(len(self.tensors)))
        turns = min(TURNS, len(self.tensors) // FEW) or 1
        self._parts = [self._all[turn::turns] for turn in range(turns)]
        self._turn = 0
        self._expected_parts: list[tuple[list[int], ...] | None] = [None] * turns
        keys = list(map(id, self.tensors))
        here = weakref.ref(self, functools.partial(_forget, keys))
        _owners.update((key, (here, index)) for index, key in enumerate(keys))

    def lie(self, *, in_turn: bool = False) -> bool:
        """Return whether all lie where they lay; of many, `in_turn`, an eighth is compared.

        A program that exchanges the memory of gradients (`.data =`) does so with all of them.
        """
        if not in_turn:
            return self._lie(self._all)
        self._turn = (self._turn + 1) % len(self._parts)
        return self._lie(self._parts[self._turn])

    def _lie(self, indices: list[int]) -> bool:
        tensors, addresses = [self.tensors[index] for index in indices], [self._addresses[index] for index in indices]
        return torch_internals.data_ptrs_equal(tensors, addresses, self._all[: len(indices)])

    def held(self, standing: Collection[int], among: Iterable[int] | None = None) -> int | None:
        """Return one that something else than Encore holds. Those `standing`, by identity, are each in one `.grad`."""
        indices = self._all if among is None else list(among)
        keys = list(map(id, self.tensors))
        counts = zip(*self._counts.of(indices), strict=True)
        expected = [self._expected(index, keys[index] in standing) for index in indices]
        return next((index for index, now, one in zip(indices, counts, expected, strict=True) if now != one), None)

    def stand_unheld(self) -> bool:
        """Return whether each is in one `.grad`, and only Encore holds them apart from that, as far as it is compared.

        Of tensors all are compared, of storages those whose turn it is.
        """
        if list(map(sys.getrefcount, self.tensors)).count(_standing()) != len(self.tensors):
            return False
        part = self._parts[self._turn]
        if self._expected_parts[self._turn] is None:
            counts = [self._expected(index, stands=True) for index in part]
            self._expected_parts[self._turn] = tuple(map(list, zip(*counts, strict=True)))
        return self._counts.of(part) == self._expected_parts[self._turn] or not part

    def _expected(self, index: int, stands: bool) -> Counts:
        of_tensor, of_object, of_storage, of_its_object = _known()[stands]
        return of_tensor, of_object, of_storage + self._sharing[index], of_its_object + self._sharing[index]


def _forget(keys: Sequence[int], gone: object) -> None:
    for key in keys:
        if (found := _owners.get(key)) is not None and found[0] is gone:
            del _owners[key]


@functools.cache
def _known() -> tuple[Counts, Counts]:
    """Return the counts of a gradient that only Encore holds, and of one that is in a `.grad`, too."""
    with torch.inference_mode(False):
        sample = GradientReferences([torch.zeros(1, device="cpu")])
        (alone,) = zip(*sample._counts.of([0]), strict=True)
        parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        parameter.grad = sample.tensors[0]
        (in_a_grad,) = zip(*sample._counts.of([0]), strict=True)
        return alone, in_a_grad


@functools.cache
def _standing() -> int:
    """Return how often the object of a gradient is referred to that is in a `.grad`, and that only Encore holds."""
    with torch.inference_mode(False):
        sample = GradientReferences([torch.zeros(1, device="cpu")])
        parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        parameter.grad = sample.tensors[0]
        (count,) = map(sys.getrefcount, sample.tensors)
        return count


def own(gradients: Sequence[torch.Tensor | None]) -> list[Owned | None]:
    """Return who holds each of these plain tensors for Encore, from now on."""
    new = {id(one): one for one in gradients if one is not None and _owner(id(one)) is None}
    made = GradientReferences(list(new.values())) if new else None
    found = [None if one is None else _owner(id(one)) for one in gradients]
    del made  # what is found holds it
    return found


def _owner(key: int) -> Owned | None:
    known = _owners.get(key)
    references = known[0]() if known is not None else None
    return (references, known[1]) if known is not None and references is not None else None


def held_gradient(parameters: Sequence[torch.Tensor], indices: Iterable[int]) -> int | None:
    """Return one of these places of parameters whose `.grad` something else than Encore holds, too.

    A gradient that Encore knows is bound to no name here, and stands in no list, which would count.
    """
    strangers: list[torch.Tensor | None] = [None] * len(parameters)
    for index in indices:
        key = id(parameters[index].grad)
        if (known := _owner(key)) is None:
            strangers[index] = parameters[index].grad
        elif known[0].held({key}, (known[1],)) is not None:
            return index
    alone = have_no_other_reference(strangers, as_gradients=True)
    return next((index for index, one in enumerate(strangers) if one is not None and not alone[index]), None)
