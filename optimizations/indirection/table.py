"""The pointer table of one executable graph: what prelude and rewritten Triton kernels read their pointers from.

Note [How the table is written]. A replay that finds moved inputs must change the table after the replays before it have
read it, and before its own graph does. It launches a kernel on the current stream, right before the graph, that takes
the words by value: CUDA copies a launch's arguments at once, so there is no buffer that a call in flight might still be
reading, nothing waits, and nothing is launched when nothing moved. The other choices were a copy from pageable memory,
which may wait for the stream, and pinned buffers, which must not be reused before an event says so.

Up to `WORDS_PER_LAUNCH` words go over in one launch; the words between the first and the last that changed are written.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from optimizations.indirection.cubin_cache import CubinCache
from optimizations.indirection.nvrtc import compile_cubin
from optimizations.indirection.plan import Slot
from optimizations.indirection.tensor_map import ReplaceAddress
from optimizations.replay.captured import WORD_BYTES
from optimizations.replay.driver import check

KERNEL_NAME = "encore_write_pointers"
THREADS_PER_BLOCK = 128
WORDS_PER_LAUNCH = 480
"""Kernel arguments may take 4096 bytes on every driver and GPU that PyTorch runs on."""

SOURCE = f"""
struct Words {{ unsigned long long word[{WORDS_PER_LAUNCH}]; }};

extern "C" __global__ void {KERNEL_NAME}(unsigned long long* destination, unsigned count, const Words words)
{{
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count) destination[index] = words.word[index];
}}
"""

Write = Callable[[int, int, int], None]
"""Writes (destination address on the device, source address on the host, words) in stream order."""


class TableUnavailable(RuntimeError):
    """No pointer table can be written here; the message says why."""


class AddressRefused(RuntimeError):
    """The driver does not take this address in a tensor map."""


def build_table_kernel(target: str, cache: CubinCache) -> bytes:
    """The cubin of the kernel that writes tables, for `target` (`sm_90`), from the cache or compiled.

    Raises:
        TableUnavailable: NVRTC is missing, or it refused the target; the message holds what it said.
    """
    try:
        from cuda.bindings import nvrtc

        version = ".".join(str(part) for part in check(nvrtc.nvrtcVersion))
        key = ("table", SOURCE, target, version)
        return cache.get_or_build(key, lambda: compile_cubin(nvrtc, SOURCE, f"{KERNEL_NAME}.cu", target)).image
    except (ImportError, RuntimeError, OSError) as error:
        raise TableUnavailable(
            f"the pointer table needs NVRTC, which comes with torch's CUDA wheels ({error})"
        ) from error


class TableWriter:
    """Launches `function`, the kernel that writes a table, on the stream (`CUstream`) that `stream` gives.

    The arguments' memory is prepared once.
    """

    def __init__(self, driver: Any, function: Any, stream: Callable[[], Any]) -> None:
        self._driver = driver
        self._function = function
        self._stream = stream
        self._destination = ctypes.c_uint64()
        self._count = ctypes.c_uint32()
        self._arguments = (ctypes.c_void_p * 3)(ctypes.addressof(self._destination), ctypes.addressof(self._count), 0)

    def __call__(self, destination: int, source: int, words: int) -> None:
        """`Write`. At `source` there must be `WORDS_PER_LAUNCH` words beyond the last one to be readable."""
        stream = self._stream()
        for first in range(0, words, WORDS_PER_LAUNCH):
            count = min(WORDS_PER_LAUNCH, words - first)
            self._destination.value = destination + first * WORD_BYTES
            self._count.value = count
            self._arguments[2] = source + first * WORD_BYTES
            check(
                self._driver.cuLaunchKernel,
                self._function,
                *(-(-count // THREADS_PER_BLOCK), 1, 1),
                *(THREADS_PER_BLOCK, 1, 1),
                0,
                stream,
                ctypes.addressof(self._arguments),
                0,
            )


class PointerTable:
    """Slots in device memory and the copy of them that the host keeps.

    Args:
        slots: all slots; together they fill the table without gaps.
        memory: int64 tensor on the device that holds exactly the table; it lives as long as this object.
        write: how words get there.
        replace_address: how a tensor map's address is replaced; None where there are no tensor maps.
    """

    def __init__(
        self, slots: Sequence[Slot], memory: torch.Tensor, write: Write, replace_address: ReplaceAddress | None
    ) -> None:
        self._slots: dict[int, list[Slot]] = defaultdict(list)
        for slot in slots:
            self._slots[slot.input].append(slot)
        self._memory = memory
        self._write = write
        self._replace_address = replace_address
        size = memory.numel() * WORD_BYTES
        # The kernel takes a whole launch's words by value, however few of them count.
        self._host = ctypes.create_string_buffer(size + WORDS_PER_LAUNCH * WORD_BYTES)
        self._host_address = ctypes.addressof(self._host)
        self.address = memory.data_ptr()

    def point(self, addresses: Mapping[int, int]) -> int:
        """See `following.Pointers`.

        Raises:
            AddressRefused: an address cannot be put into a tensor map.
        """
        first, last = self._memory.numel(), 0
        for index, address in addresses.items():
            for slot in self._slots.get(index, ()):
                content = self._content(slot, address + slot.delta)
                ctypes.memmove(self._host_address + slot.offset_bytes, content, len(content))
                first = min(first, slot.offset_bytes // WORD_BYTES)
                last = max(last, (slot.offset_bytes + slot.size_bytes) // WORD_BYTES)
        if last <= first:
            return 0
        start = first * WORD_BYTES
        self._write(self.address + start, self._host_address + start, last - first)
        return (last - first) * WORD_BYTES

    def _content(self, slot: Slot, address: int) -> bytes:
        if slot.tensor_map is None:
            return address.to_bytes(WORD_BYTES, "little")
        replaced = self._replace_address(slot.tensor_map, address) if self._replace_address else None
        if replaced is None:
            raise AddressRefused(
                f"the driver does not take address {address:#x} in the tensor map of input {slot.input}"
            )
        return replaced
