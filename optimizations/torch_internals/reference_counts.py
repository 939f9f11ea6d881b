"""Read the reference counts of many tensors and of their storages, by functions that Python and PyTorch export.

A tensor has four counts: of its object in Python, of what C++ holds of it, and the same of its storage. Weak references
are not among them: who has one does not keep the tensor.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from optimizations import torch_internals

COUNTS = 4
"""Of each tensor: its object in Python, itself, its storage, and the storage's object in Python."""

TURNS = 8
"""Comparisons in which all counts are read, where there are many: PyTorch takes 90 ns for that of a storage."""
FEW = 32
"""Tensors of which so many are compared each time at least."""

_count: Callable[[object], int] = sys.getrefcount


class ReferenceCounts:
    """Keep the counts of these tensors, which have storages, with a reference to each tensor and each storage.

    Attributes:
        tensors: they.
        storages: those that the tensors had then.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        self.storages = tuple([tensor.untyped_storage() for tensor in self.tensors])
        self._cells = [storage._cdata for storage in self.storages]

    def now(self) -> Any:
        """Return `COUNTS` counts for each tensor, in their order; all 0 where a tensor has another storage now."""
        if [one.untyped_storage()._cdata for one in self.tensors] != self._cells:
            return numpy.zeros(COUNTS * len(self._cells), dtype=numpy.int32)
        found = (
            map(_count, self.tensors),
            map(torch_internals.tensor_use_count, self.tensors),
            map(torch_internals.storage_use_count, self._cells),
            map(_count, self.storages),
        )
        return numpy.array([list(counts) for counts in found], dtype=numpy.int32).T.reshape(-1)

    def compared(self, counts: Any) -> Callable[[], bool]:
        """Return a function that tells whether the counts are these.

        Of the objects of tensors all are compared. Of the rest, where it is much, an eighth is compared each time: a
        program that views gradients, or lets autograd save them, does so with more than one.
        """
        of_objects, *others = counts.reshape(-1, COUNTS).T.tolist()
        turns = min(TURNS, len(self._cells) // FEW) or 1
        places = range(len(self._cells))  # no list of tensors, which would count
        parts = [(places[at::turns], self._cells[at::turns], [one[at::turns] for one in others]) for at in range(turns)]
        turn = 0

        def same() -> bool:
            nonlocal turn
            turn = (turn + 1) % turns
            places, cells, (of_tensors, of_storages, of_their_objects) = parts[turn]
            return (
                list(map(_count, self.tensors)) == of_objects
                and [torch_internals.tensor_use_count(self.tensors[place]) for place in places] == of_tensors
                and list(map(torch_internals.storage_use_count, cells)) == of_storages
                and [_count(self.storages[place]) for place in places] == of_their_objects
                and [self.tensors[place].untyped_storage()._cdata for place in places] == cells
            )

        return same


@functools.cache
def unheld() -> tuple[Any, Any, Any]:
    """Return the counts of a tensor that nothing holds, and what is added where it is a `.grad`, and another, too.

    Its storage has been asked for. Each reference in Python to the tensor, or to that storage, adds 1.
    """
    with torch.inference_mode(False):
        holders = [torch.nn.Parameter(torch.zeros(1, device="cpu")) for _ in range(2)]
        counts = ReferenceCounts([torch.zeros(1, device="cpu")])
    alone = counts.now()
    holders[0].grad = counts.tensors[0]
    in_a_grad = counts.now()
    holders[1].grad = counts.tensors[0]
    in_another = counts.now()
    return alone - numpy.array([1, 0, 0, 1], dtype=numpy.int32), in_a_grad - alone, in_another - in_a_grad
