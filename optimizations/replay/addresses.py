"""Replay's side of indirection: notices inputs that moved and has the graph read them where they are now.

Note [When an input is copied after all]. An input that moved is copied into memory of its own for this call, and the
graph reads that, when

* its address is not aligned as the kernels may rely on, or
* it lies in the memory the graph itself writes (a result of an earlier replay that is passed back in). Stock copies an
  input before the graph runs; a graph that reads it in place may have overwritten it by then.

If the function writes the input, the copy is written back after the launch.

Note [What keeps an input alive]. The graph reads the caller's memory, so the caller's tensors must stay until the
launch is enqueued: they are left in the list of inputs, which is cleared after it. From then on the allocator's stream
order protects them, as it does for any kernel.

Note [What a launch has done]. Addresses that are written for a launch may reach the device with that launch only. So
that they are in place is known after the launch (`launched`), and not before: a call that ends in between, by an
interrupt say, leaves them to be written by the next one.

Note [Strides]. A placeholder can be filled from any strides; a kernel that reads in place relies on those of the
recording. Dynamo guards the strides of a graph's inputs, AOTAutograd brings tangents to the strides it compiled for,
and values between partitions are made by generated code.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from optimizations import torch_internals
from optimizations.captured.graph import MemoryRange


@dataclass(frozen=True, slots=True)
class FollowedInput:
    """An input that the graph reads in place, at multiples of `alignment_bytes` (a power of two).

    `mutated`: the function writes it.
    """

    index: int
    alignment_bytes: int
    mutated: bool = False


class Pointers(Protocol):
    """What changes the addresses in an executable graph."""

    def point(self, addresses: Mapping[int, int]) -> int:
        """Let the next launch find these inputs (by index) at these addresses. Returns the bytes written for it."""

    def settle(self) -> None:
        """The next launches find all inputs where the last one did, until `point` is called again."""


class OwnedMemory:
    """Memory the graph writes.

    Attributes:
        borders: where it begins, ends, begins ..., ascending. An odd number of them lies at or below an address in it.
    """

    def __init__(self, ranges: Sequence[MemoryRange]) -> None:
        self.borders: list[int] = []
        for memory in sorted(ranges, key=lambda memory: memory.address):
            end = memory.address + memory.size_bytes
            if self.borders and memory.address <= self.borders[-1]:
                self.borders[-1] = max(self.borders[-1], end)
            else:
                self.borders += [memory.address, end]

    def __contains__(self, address: int) -> bool:
        return bool(bisect_right(self.borders, address) & 1)


class Follower:
    """Keeps the addresses in one executable graph in step with the inputs of each call.

    Attributes:
        indices: the inputs that are read in place, ascending.
        addresses: by input, the address the graph reads it at; 0 before the first call, None for other inputs.
        moves: calls in which an input had moved.
        pointer_bytes: bytes written for that so far.
        stand_in_bytes: bytes copied so far because an input could not be read in place.
    """

    def __init__(
        self, inputs: Sequence[FollowedInput], input_count: int, pointers: Pointers, owned: OwnedMemory
    ) -> None:
        inputs = sorted(inputs, key=lambda one: one.index)
        self._checks = [(one.index, one.alignment_bytes - 1, one) for one in inputs]
        self._pointers = pointers
        self._owned = owned
        # Note [What a launch has done]: written for the next launch; or written by one, so that they need not be again.
        self._pending = False
        self._written = False
        self.indices = [one.index for one in inputs]
        self.addresses: list[int | None] = [None] * input_count
        for index in self.indices:
            self.addresses[index] = 0
        self.mutated = tuple(one.index for one in inputs if one.mutated)
        self._write_back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.moves = 0
        self.pointer_bytes = 0
        self.stand_in_bytes = 0

    def follow(self, inputs: list[Any]) -> None:
        """Bring the graph to these inputs. One comparison in C++ where nothing moved.

        An input that cannot be read in place is replaced in `inputs` by its copy.
        """
        if self._write_back:
            self._write_back.clear()  # of a call that never launched
        if not torch_internals.data_ptrs_equal(inputs, self.addresses, self.indices):
            self._move(inputs)
        elif self._written:
            self._pointers.settle()
            self._written = False

    def _move(self, inputs: list[Any]) -> None:
        addresses, borders = self.addresses, self._owned.borders
        self._written = False
        moved: dict[int, int] = {}
        for index, below_alignment, one in self._checks:
            address = inputs[index].data_ptr()
            if address == addresses[index]:
                continue
            if address & below_alignment or bisect_right(borders, address) & 1:
                address = self._stand_in(inputs, one)
            moved[index] = address
        try:
            self.pointer_bytes += self._pointers.point(moved)
        except BaseException:
            for index in moved:
                addresses[index] = 0  # unknown: the next call writes them all again
            raise
        self._pending = True
        self.moves += 1
        for index, address in moved.items():
            addresses[index] = address

    def _stand_in(self, inputs: list[Any], one: FollowedInput) -> int:
        """Copy the input; Note [When an input is copied after all]."""
        original = inputs[one.index]
        copy = inputs[one.index] = torch_internals.clone_preserve_strides(original)
        self.stand_in_bytes += copy.untyped_storage().nbytes()
        if one.mutated:
            self._write_back.append((original, copy))
        return copy.data_ptr()

    def launched(self) -> None:
        """To be called after each launch: notes that it was made, and writes back what the function put into copies."""
        if self._pending:
            self._pending, self._written = False, True
        if self._write_back:
            for original, copy in self._write_back:
                original.copy_(copy)
            self._write_back.clear()

    def writes_owned_memory(self, inputs: Sequence[Any]) -> bool:
        """Whether an input that the function writes lies in memory of the graph's own, where no write-back may go."""
        return any(inputs[index].data_ptr() in self._owned for index in self.mutated)
