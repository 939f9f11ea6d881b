"""Ranges of device memory, merged where they meet: does an address, or a part of another range, lie in one of them?"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from optimizations.graph.records import MemoryRange


class MemoryRanges:
    """Memory in several places.

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

    def joined(self, ranges: Iterable[MemoryRange]) -> MemoryRanges:
        """These and those."""
        own = zip(self.borders[::2], self.borders[1::2], strict=True)
        return MemoryRanges([*(MemoryRange(address=start, size_bytes=end - start) for start, end in own), *ranges])

    def __contains__(self, address: int) -> bool:
        return bool(bisect_right(self.borders, address) & 1)

    def cover(self, address: int, size_bytes: int) -> bool:
        """Whether all of the `size_bytes` bytes from `address` on lie in it."""
        below = bisect_right(self.borders, address)
        return bool(below & 1) and address + size_bytes <= self.borders[below]

    def overlap(self, address: int, size_bytes: int) -> bool:
        """Whether one of the `size_bytes` bytes from `address` on lies in it."""
        if not size_bytes:
            return False
        below = bisect_right(self.borders, address)
        return bool(below & 1) or (below < len(self.borders) and self.borders[below] < address + size_bytes)
