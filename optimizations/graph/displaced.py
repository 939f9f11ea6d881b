"""Places for a second capture's inputs, at addresses that differ from the recording's by a known distance each.

A capture reads no data, so the places may overlap: all inputs share one buffer that is little longer than the largest
of them. A word of a kernel's arguments that changed by an input's displacement, and pointed into that input before, is
an address of that input.

Note [Displacements]. No two inputs move by the same distance, or their addresses could not be told apart. All distances
are odd multiples of `GRANULE_BYTES`: the difference of two addresses changes by an even multiple, so that it is never
taken for an address. A place has the alignment of the recording's up to `GRANULE_BYTES`, because libraries choose
kernels by alignment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from optimizations.graph.records import MemoryRange

GRANULE_BYTES = 512
"""What PyTorch's allocator aligns to."""


@dataclass(frozen=True, slots=True)
class Displacement:
    """Where each input lies relative to the start of the shared buffer, and how long the buffer has to be."""

    offsets: Mapping[int, int]
    size_bytes: int


def displace(memory: Mapping[int, MemoryRange], start: int) -> Displacement:
    """Places for inputs that lay at `memory` (by input) in a buffer that begins at address `start`.

    `start` is a multiple of `GRANULE_BYTES`. Note [Displacements].
    """
    offsets: dict[int, int] = {}
    taken: set[int] = set()
    granule = 0
    end = 0
    for index, where in sorted(memory.items()):
        residue = where.address % GRANULE_BYTES
        while True:
            offset = granule * GRANULE_BYTES + residue
            distance = start + offset - where.address
            granule += 1
            if (distance // GRANULE_BYTES) % 2 and distance not in taken:
                break
        taken.add(distance)
        offsets[index] = offset
        end = max(end, offset + where.size_bytes)
    return Displacement(offsets, end)


def buffer_bytes(memory: Mapping[int, MemoryRange]) -> int:
    """An upper bound of the buffer that `displace` needs."""
    largest = max((one.size_bytes for one in memory.values()), default=0)
    # Parity and repeated distances skip places: each input passes over at most as many as there are inputs.
    return largest + (4 * len(memory) + 4) * GRANULE_BYTES


def size_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last, gaps of the strides included."""
    if 0 in tensor.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether there is less memory from its first element to its last than it has elements."""
    return size_bytes(tensor) < tensor.numel() * tensor.element_size()


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of it lie in the same memory, as those of an expanded one. A column of a matrix that is expanded
    does, too, though the gaps between its rows may be wider. PyTorch writes no tensor with a stride of 0."""
    repeats = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return is_expanded(tensor) or (repeats and tensor.numel() > 0)


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from the first to the last element of `tensor`, as a view of one dimension and dtype uint8."""
    elements = size_bytes(tensor) // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,)).view(torch.uint8)


def each_once(tensor: torch.Tensor) -> torch.Tensor:
    """A view that can be written, of a tensor that overlaps: its memory where that is less than it has elements, and
    without what is repeated otherwise."""
    if is_expanded(tensor):
        return data_of(tensor)
    shape = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.detach().as_strided(shape, tensor.stride())


def storage_of(tensor: torch.Tensor) -> MemoryRange:
    """The memory that `tensor` is a view of."""
    storage = tensor.untyped_storage()
    return MemoryRange(address=storage.data_ptr(), size_bytes=storage.nbytes())


def memory_of(tensor: torch.Tensor) -> MemoryRange:
    """Where the data of `tensor` lies, from its first element to the end of its last."""
    return MemoryRange(address=tensor.data_ptr(), size_bytes=size_bytes(tensor))
