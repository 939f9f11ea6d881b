"""Describe the kernel by which PyTorch copies lists of tensors on a GPU. Checked on the headers of PyTorch 2.11.

`torch._foreach_copy_` launches it (ATen/native/cuda/MultiTensorApply.cuh) where all tensors are of one type and on one
GPU, and each is dense and has the shape and strides of its copy; otherwise it copies one after another. A block of the
kernel copies up to `BLOCK_ELEMENTS`. One launch has room for `MOST_TENSORS` in up to `MOST_BLOCKS`, and begins when one
of these is full, so that lists that do not exceed them are copied by one. What the kernel reads and writes stands in
its first argument, a structure by value: sources, copies, and how many elements each has, lists of as many words as
there is room for, one after the other. The rest holds whatever was in PyTorch's memory before. Some versions had more
room, in arguments of 32 KB; so how much there is follows from where the lists are.

Vectors of four elements are read and written where both ends are aligned to that, and single elements elsewhere. Half
precision is computed in single precision, where a NaN loses its bits. So the copies here are of whole numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from optimizations import torch_internals

MOST_TENSORS = 64
MOST_BLOCKS = 320
BLOCK_ELEMENTS = 65536

_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WHOLE_NUMBERS = {
    kind: _BY_SIZE[kind.itemsize]
    for kind in (
        *(torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int16, torch.uint16, torch.float16, torch.bfloat16),
        *(torch.int32, torch.uint32, torch.float32),
        *(torch.int64, torch.uint64, torch.float64, torch.complex64),
    )
}
"""By type of tensors that can be copied so, the type that the kernel takes them for."""


def blocks_of(elements: int) -> int:
    """Return the number of blocks that copy a tensor of so many elements."""
    return -(-elements // BLOCK_ELEMENTS)


def copy_lists(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy contiguous tensors of one of the types of `WHOLE_NUMBERS`, bit by bit."""
    kind = WHOLE_NUMBERS[targets[0].dtype]
    with torch.no_grad():
        torch_internals.foreach_copy_(
            [one.view(kind) for one in targets], [one.view(kind) for one in sources], non_blocking=True
        )


def places_of_sources(
    argument: bytes, sources: Sequence[int], targets: Sequence[int], elements: Sequence[int]
) -> list[int] | None:
    """Return where the kernel's first argument has the addresses of each source, in bytes from its beginning.

    None where it is not that of one launch that copies these `sources` to these `targets`, of so many elements each.
    """
    words = struct.Struct(f"<{len(sources)}Q")
    expected = tuple(sources), tuple(targets), tuple(elements)
    for room in range(MOST_TENSORS, len(argument) // 24 + 1):
        if all(words.unpack_from(argument, 8 * room * place) == one for place, one in enumerate(expected)):
            return [8 * index for index in range(len(sources))]
    return None
