"""Read the reference counts of tensors and of their storages, by functions that Python and PyTorch export.

A tensor has four counts: of its object in Python, of what C++ holds of it, and the same of its storage. Weak references
are not among them: who has one does not keep the tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch

from optimizations import torch_internals


class ReferenceCounts:
    """Keep these tensors, which have storages, with a reference to each tensor and each storage.

    Attributes:
        tensors: they.
        storages: those that the tensors had then, and `cells` their addresses in C++.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        self.storages = tuple([tensor.untyped_storage() for tensor in self.tensors])
        self.cells = [storage._cdata for storage in self.storages]

    def of(self, indices: Sequence[int]) -> tuple[list[int], ...]:
        """Return the four counts of these tensors, with the storages that they had."""
        tensors, storages = [self.tensors[index] for index in indices], [self.storages[index] for index in indices]
        of_tensors = list(map(sys.getrefcount, tensors)), list(map(torch_internals.tensor_use_count, tensors))
        return *of_tensors, *storage_counts([self.cells[index] for index in indices], storages)


def storage_counts(cells: Sequence[int], storages: Sequence[torch.UntypedStorage]) -> tuple[list[int], list[int]]:
    """Return what C++ holds of storages, by their addresses there, and Python of their objects."""
    return list(map(torch_internals.storage_use_count, cells)), list(map(sys.getrefcount, storages))
