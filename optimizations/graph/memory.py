"""Find where tensors lie in device memory, and check whether addresses and ranges lie in other ranges."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import torch

from optimizations.graph.records import MemoryRange


class MemoryRanges:
    """Hold several ranges of memory as a sorted list of borders.

    Attributes:
        borders: where it begins, ends, begins ..., ascending. An odd number of them lies at or below an address in it.
    """

    def __init__(self, ranges: Iterable[MemoryRange]) -> None:
        self.borders: list[int] = []
        for memory in sorted(ranges, key=lambda memory: memory.address):
            end = memory.address + memory.size_bytes
            if not memory.size_bytes:
                continue
            if self.borders and memory.address <= self.borders[-1]:
                self.borders[-1] = max(self.borders[-1], end)
            else:
                self.borders += [memory.address, end]

    @property
    def ranges(self) -> tuple[MemoryRange, ...]:
        """Return the ranges, ascending, those that adjoin joined."""
        pairs = zip(self.borders[::2], self.borders[1::2], strict=True)
        return tuple(MemoryRange(address=start, size_bytes=end - start) for start, end in pairs)

    def __contains__(self, address: int) -> bool:
        return bool(bisect_right(self.borders, address) & 1)

    def overlap(self, address: int, size_bytes: int) -> bool:
        """Return whether one of the `size_bytes` bytes from `address` on lies in it."""
        if not size_bytes:
            return False
        below = bisect_right(self.borders, address)
        return bool(below & 1) or (below < len(self.borders) and self.borders[below] < address + size_bytes)


def size_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last, gaps of the strides included."""
    if 0 in tensor.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether there is less memory from its first element to its last than it has elements."""
    return size_bytes(tensor) < tensor.numel() * tensor.element_size()


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements of it lie in the same memory, as those of an expanded tensor.

    Elements of an expanded column of a matrix do, too, though the gaps between its rows may be wider. PyTorch writes no
    tensor with a stride of 0.
    """
    repeats = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return is_expanded(tensor) or (repeats and tensor.numel() > 0)


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes from the first to the last element of `tensor`, as a view of one dimension and dtype uint8."""
    elements = size_bytes(tensor) // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,)).view(torch.uint8)


def each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a writable view of a tensor whose elements overlap.

    It is `data_of` where there is less memory than elements, and the tensor without repeated elements otherwise.
    """
    if is_expanded(tensor):
        return data_of(tensor)
    shape = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.detach().as_strided(shape, tensor.stride())


def storage_of(tensor: torch.Tensor) -> MemoryRange:
    """Return the memory that `tensor` is a view of."""
    storage = tensor.untyped_storage()
    return MemoryRange(address=storage.data_ptr(), size_bytes=storage.nbytes())


def memory_of(tensor: torch.Tensor) -> MemoryRange:
    """Return where the data of `tensor` lies, from its first element to the end of its last."""
    return MemoryRange(address=tensor.data_ptr(), size_bytes=size_bytes(tensor))
