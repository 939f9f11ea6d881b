"""Read the reference counts of tensors and of their storages, by functions that Python and PyTorch export.

A tensor has four counts: of its object in Python, of what C++ holds of it, and the same of its storage. Weak references
are not among them: who has one does not keep the tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from optimizations import torch_internals


class ReferenceCounts:
    """Keep these tensors, which have storages, with a reference to each tensor and each storage.

    Attributes:
        tensors: they.
        storages: those that the tensors had then.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        self.storages = tuple([tensor.untyped_storage() for tensor in self.tensors])

    def of(self, index: int) -> tuple[int, ...]:
        """Return the counts of one of the tensors, with the storage that it had."""
        tensor = sys.getrefcount(self.tensors[index]), torch_internals.tensor_use_count(self.tensors[index])
        return *tensor, *storage_counts(self.storages[index])


def storage_counts(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return what C++ holds of a storage, and Python of its object."""
    return torch_internals.storage_use_count(storage._cdata), sys.getrefcount(storage)
