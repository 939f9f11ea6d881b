"""Memory for recording inputs outside of the graph's memory pool, and what can be done with it.

Stock allocates the placeholder of an input in the graph's pool, where an intermediate may take its address over once
the input is dead. A pointer found in the graph could then be either. Here each placeholder has a buffer of its own that
is held until the end of the recording, so an address in it can be nothing else.

Note [Two addresses, one buffer]. The two captures that are compared need every placeholder at two addresses, each moved
by a distance of its own. Capturing reads no data, so the two places may overlap: the buffer is longer than the input by
an odd multiple of `GRANULE_BYTES` that no other input has, and the second place lies that far behind the first. Odd,
so that the difference of two addresses, which changes by an even one, is not taken for an address that moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from optimizations.captured.graph import MemoryRange

GRANULE_BYTES = 512
"""What PyTorch's allocator aligns to; libraries choose kernels by alignment, so both places have that of stock."""


@dataclass(frozen=True, slots=True)
class OutsidePlaceholder:
    """Memory for the recording input `index`.

    `tensor` has the input's shape, strides and dtype and lies at the start of `buffer` (uint8, one dimension);
    `shifted` is the same further on.
    """

    index: int
    buffer: torch.Tensor
    tensor: torch.Tensor
    shifted: torch.Tensor
    size_bytes: int

    @property
    def data(self) -> torch.Tensor:
        """The bytes from the first to the last element, uint8."""
        return self.buffer[: self.size_bytes]

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy the data of `tensor`, of the same shape, strides and dtype, to where replay reads it."""
        self.data.copy_(data_of(tensor))

    @property
    def memory(self) -> MemoryRange:
        """Where the input's data lies in the capture that is replayed."""
        return MemoryRange(address=self.tensor.data_ptr(), size_bytes=self.size_bytes)

    @property
    def shifted_memory(self) -> MemoryRange:
        """Where it lies in the other capture."""
        return MemoryRange(address=self.shifted.data_ptr(), size_bytes=self.size_bytes)


def size_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last, gaps of the strides included."""
    if 0 in tensor.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from the first to the last element of `tensor`, as a view of one dimension and dtype uint8."""
    elements = size_bytes(tensor) // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,)).view(torch.uint8)


def outside_placeholders(inputs: Mapping[int, torch.Tensor]) -> dict[int, OutsidePlaceholder]:
    """A placeholder for each of these inputs, on the input's device, without data. Note [Two addresses, one buffer].

    Raises:
        torch.OutOfMemoryError: the device does not have the memory.
    """
    return {
        index: _placeholder(index, tensor, (2 * rank + 1) * GRANULE_BYTES)
        for rank, (index, tensor) in enumerate(sorted(inputs.items()))
    }


def _placeholder(index: int, like: torch.Tensor, shift_bytes: int) -> OutsidePlaceholder:
    size = size_bytes(like)
    buffer = torch.empty(size + shift_bytes, dtype=torch.uint8, device=like.device)
    tensor, shifted = (
        buffer[start : start + size].view(like.dtype).as_strided(like.shape, like.stride())
        for start in (0, shift_bytes)
    )
    return OutsidePlaceholder(index, buffer, tensor, shifted, size)


def poison(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes that stand for values of `dtype` nobody would pass, as many as in `data` (uint8).

    NaN for floating-point and complex numbers. Integers may be indices, and an index out of range stops the process: 0
    is in range wherever anything is. Booleans are inverted.
    """
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full_like(data, 0xFF)
    if dtype is torch.bool:
        return data ^ 1
    return torch.zeros_like(data)
