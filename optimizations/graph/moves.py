"""Compute how each placeholder moved between two captures, and find the inputs that explain a changed value.

Most values of a graph are equal in both captures, or addresses in the graph's own memory. `Moves.unsettled` finds the
few others, and compares all parameters at once: value by value it would take many times as long as a recording.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import unpack_from
from typing import Any

import numpy as np

from optimizations.graph.records import WORD_BYTES, Capture, MemoryRange, Placeholder

ADDRESS_SPACE = 2**64


@dataclass(frozen=True, slots=True)
class Origin:
    """Give an address as an offset into an input: `delta` bytes from the input's `data_ptr`."""

    input: int
    delta: int


class Moves:
    """Hold the displacement of every input's placeholder from one capture to another.

    A value is the address of input i exactly when it changed by the displacement of i and points to the same place in
    i's placeholder in both captures. One past the end counts as a place: kernels are given such addresses as limits.

    Attributes:
        displacement: how far the placeholder of each input moved, in bytes.
        moved_starts: the starts of the placeholders that moved.

    Raises:
        ValueError: the captures are not of the same inputs, or a placeholder has another size.
    """

    def __init__(self, first: Capture, second: Capture) -> None:
        self._first = _by_input(first)
        second_placeholders = _by_input(second)
        if self._first.keys() != second_placeholders.keys():
            raise ValueError(
                f"the captures have placeholders for inputs {sorted(self._first)} and {sorted(second_placeholders)}"
            )
        self._owned = (first.owned, second.owned)
        self.displacement: dict[int, int] = {}
        self._moved_by: dict[int, list[int]] = defaultdict(list)
        for index, placeholder in self._first.items():
            moved_to = second_placeholders[index].memory
            if placeholder.memory.size_bytes != moved_to.size_bytes:
                raise ValueError(
                    f"the placeholder of input {index} has {placeholder.memory.size_bytes} bytes in one capture and "
                    f"{moved_to.size_bytes} in the other"
                )
            displacement = (moved_to.address - placeholder.memory.address) % ADDRESS_SPACE
            self.displacement[index] = displacement
            if displacement:
                self._moved_by[displacement].append(index)
        self.moved_starts = frozenset(Origin(index, 0) for index in self._first if self.displacement[index])

    @property
    def inputs(self) -> tuple[int, ...]:
        """Return all inputs, ascending."""
        return tuple(sorted(self._first))

    def size_bytes(self, index: int) -> int:
        """Return the bytes of the input's placeholder."""
        return self._first[index].memory.size_bytes

    def sharing_displacement(self, index: int) -> tuple[int, ...]:
        """Return the other inputs that moved by the same distance as this one."""
        displacement = self.displacement[index]
        return tuple(other for other in self._moved_by.get(displacement, ()) if other != index)

    def in_step(self, first_value: int, second_value: int) -> tuple[Origin, ...]:
        """Return the inputs whose displacement is this change, with the value's offset, inside or outside of them."""
        inputs = self._moved_by.get((second_value - first_value) % ADDRESS_SPACE, ())
        return tuple(Origin(index, first_value - self._first[index].memory.address) for index in inputs)

    def origins(self, first_value: int, second_value: int) -> tuple[Origin, ...]:
        """Return the inputs, with offset, whose address the two values may be; several where that is ambiguous."""
        return tuple(
            origin
            for origin in self.in_step(first_value, second_value)
            if 0 <= origin.delta <= self.size_bytes(origin.input)
        )

    def is_owned(self, first_value: int, second_value: int) -> bool:
        """Return whether the values are addresses in the graph's own memory in both captures."""
        return _in_any(first_value, self._owned[0]) and _in_any(second_value, self._owned[1])

    def unsettled(self, pairs: Sequence[tuple[bytes, bytes]]) -> dict[int, list[int]]:
        """Return the aligned words that changed, and not from one address in the graph's own memory to another.

        An address that moved like an input is returned, too.

        Args:
            pairs: the bytes of one kernel parameter in the first and the second capture, of the same length.

        Returns:
            The positions of pairs with such words, ascending, and the byte offsets of the words.
        """
        if not pairs:
            return {}
        words = [-(-len(first) // WORD_BYTES) for first, _ in pairs]
        # The last bytes of a word are filled up so that it is no address.
        first, second = (
            np.frombuffer(
                b"".join(
                    pair[place].ljust(count * WORD_BYTES, b"\xff") for pair, count in zip(pairs, words, strict=True)
                ),
                dtype="<u8",
            )
            for place in (0, 1)
        )
        places = np.flatnonzero(first != second)
        before, after = first[places], second[places]
        moved_by = np.array(list(self._moved_by), dtype=np.uint64)
        settled = _are_in(before, self._owned[0]) & _are_in(after, self._owned[1]) & ~np.isin(after - before, moved_by)
        starts = np.cumsum([0, *words])
        found: dict[int, list[int]] = defaultdict(list)
        for place in places[~settled].tolist():
            position = int(np.searchsorted(starts, place, side="right")) - 1
            found[position].append((place - int(starts[position])) * WORD_BYTES)
        return found

    def first_address(self, origin: Origin) -> int:
        """Return the address of `origin` in the first capture."""
        return self._first[origin.input].memory.address + origin.delta

    def second_address(self, origin: Origin) -> int:
        """Return the address of `origin` in the second capture."""
        return (
            self._first[origin.input].memory.address + self.displacement[origin.input] + origin.delta
        ) % ADDRESS_SPACE


def changed_items(first: bytes, second: bytes, size: int, start: int = 0) -> Iterator[int]:
    """Yield where items of `size` bytes differ, of those that begin at `start` and are complete."""
    items = f"<{(len(first) - start) // size}{'Q' if size == WORD_BYTES else 'I'}"
    pairs = zip(unpack_from(items, first, start), unpack_from(items, second, start), strict=True)
    for index, (one, other) in enumerate(pairs):
        if one != other:
            yield start + index * size


def _by_input(capture: Capture) -> dict[int, Placeholder]:
    return {placeholder.input: placeholder for placeholder in capture.placeholders}


def _in_any(address: int, ranges: tuple[MemoryRange, ...]) -> bool:
    return any(address in memory for memory in ranges)


def _are_in(
    words: np.ndarray[Any, np.dtype[np.uint64]], ranges: tuple[MemoryRange, ...]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each word whether it is an address in one of the ranges."""
    found = np.zeros(len(words), dtype=np.bool_)
    for start, end in (one.span for one in ranges):
        found |= (words >= np.uint64(start)) & (words < np.uint64(end))
    return found
