"""Read the reference counts of tensors and of their storages, by functions that Python and PyTorch export.

A tensor has four counts: of its object in Python, of what C++ holds of it, and the same of its storage. Weak references
are not among them: who has one does not keep the tensor. Pass what is kept, and no list made for the call, which would
be counted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from optimizations import torch_internals


def references_to(objects: Sequence[object]) -> list[int]:
    """Return the number of Python's references to each object."""
    return list(map(sys.getrefcount, objects))


def four_counts(
    tensors: Sequence[torch.Tensor], cells: Sequence[int], storages: Sequence[torch.UntypedStorage]
) -> tuple[list[int], ...]:
    """Return what Python holds of tensors' objects and C++ of the tensors, then what both hold of their storages."""
    of_storages, of_objects = storage_counts(cells, storages)
    return references_to(tensors), list(map(torch_internals.tensor_use_count, tensors)), of_storages, of_objects


def storage_counts(cells: Sequence[int], storages: Sequence[torch.UntypedStorage]) -> tuple[list[int], list[int]]:
    """Return what C++ holds of storages, by their addresses there, and Python of their objects."""
    return list(map(torch_internals.storage_use_count, cells)), references_to(storages)
