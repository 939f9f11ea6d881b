"""Find the inputs that moved since the last replay, and update their addresses in the graph.

Note [When an input is copied after all]. An input that moved is copied into its placeholder for this call, as in stock,
and the graph reads the placeholder, if

* its address does not have the alignment that the kernels may rely on, or
* a part of it is in memory that the graph itself writes: a result of an earlier replay that is passed back in, or a
  view of a buffer that the function changes. Stock copies an input before the graph runs; a graph that reads it in
  place may already have overwritten it. The input may begin before that memory: a storage need not cover a whole
  allocation (DLPack gives views storages of their own), and the buffer of this call may be a view of a larger one at
  the same address.

An input without a placeholder is cloned for this call instead, and the clone is read: see `without_placeholder`.

Note [What keeps an input alive]. The graph reads the caller's memory, so the caller's tensors must stay alive until the
launch is enqueued: they remain in the list of inputs, which is cleared afterwards. From then on the allocator's stream
order protects them, as it does for any kernel.

Note [What a launch has done]. Addresses that are written for a launch may reach the device only with that launch. So
they count as written only after the launch (`launched`). If a call is interrupted before it, the next call writes them
again.

Note [Strides]. A placeholder can be filled from any strides; a kernel that reads in place relies on those of the
recording. Dynamo guards the strides of a graph's inputs, AOTAutograd restrides tangents to the strides it compiled for,
and generated code makes the values between partitions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from optimizations import torch_internals
from optimizations.graph.memory import MemoryRanges

Check = tuple[int, int, int | None, int]
"""An input to check: its index, the bits its address must not have, its placeholder, its size in bytes."""


@dataclass(frozen=True, slots=True)
class TrackedInput:
    """Describe an input that the graph reads in place, at multiples of `alignment_bytes` (a power of two).

    `placeholder`: the address it is copied to if it cannot be read in place; None if it is cloned instead.
    `size_bytes`: from its first element to the end of its last.
    """

    index: int
    alignment_bytes: int
    placeholder: int | None
    size_bytes: int = 1


class Pointers(Protocol):
    """Define an object that changes the addresses in an executable graph."""

    def point(self, addresses: Mapping[int, int]) -> int:
        """Make the next launch read these inputs (by index) at these addresses; return the bytes written for it."""

    def settle(self) -> None:
        """Make the next launches read all inputs where the last one did, until `point` is called again."""


class AddressTracker:
    """Update the addresses in one executable graph to the inputs of each call.

    Args:
        inputs: the inputs that are read in place.
        recorded: by input, the address that the graph holds now; None for an input that is not read in place.
        pointers: changes the addresses.
        overwritten: memory that the graph writes: its own, and that of inputs.
        fill: copies inputs (by index) into their placeholders; returns the addresses of placeholders that moved.

    Attributes:
        indices: the inputs that are read in place, ascending.
        addresses: by input, the address the graph reads it at; None for other inputs.
        pending: whether `launched` must be called after the next launch.
        moves: calls in which an input had moved.
        pointer_bytes: bytes written for that so far.
        placeholder_bytes: bytes copied so far because an input could not be read in place.
    """

    def __init__(
        self,
        inputs: Sequence[TrackedInput],
        recorded: Sequence[int | None],
        pointers: Pointers,
        overwritten: MemoryRanges,
        fill: Callable[[Mapping[int, torch.Tensor]], Mapping[int, int] | None],
    ) -> None:
        inputs = sorted(inputs, key=lambda one: one.index)
        self._checks = [(one.index, one.alignment_bytes - 1, one.placeholder, one.size_bytes) for one in inputs]
        self._all_checks = self._checks
        self._pointers = pointers
        self._data_ptrs_equal = torch_internals.data_ptrs_equal  # which a PyTorch without CUDA does not have
        self._overwritten = overwritten
        self._fill = fill
        # Note [What a launch has done]: addresses written for the next launch, and addresses that a launch has written.
        self.pending = False
        self._launched = False
        self.indices = [one.index for one in inputs]
        self.addresses: list[int | None] = list(recorded)
        self.moves = 0
        self.pointer_bytes = 0
        self.placeholder_bytes = 0

    def forget(self) -> None:
        """Mark all addresses as unwritten: the graph was instantiated again, and holds the recorded ones."""
        for index in self.indices:
            self.addresses[index] = 0
        self._launched = False

    def follow(self, inputs: Sequence[Any]) -> None:
        """Make the graph read these inputs. If nothing moved, this is one comparison in C++."""
        if not self._data_ptrs_equal(inputs, self.addresses, self.indices):
            self._move(inputs)
        elif self._launched:
            self._pointers.settle()
            self._launched = False

    def _move(self, inputs: Sequence[Any]) -> None:
        addresses, borders = self.addresses, self._overwritten.borders
        self._launched = False
        lies: dict[int, int] = {}
        copied: dict[int, torch.Tensor] = {}
        copied_bytes = 0
        call: Any = inputs  # a list, which keeps the clones alive until the launch
        for index, below_alignment, placeholder, size in self._checks:
            address = inputs[index].data_ptr()
            if address == addresses[index]:
                continue
            if not _reads_in_place(address, size, below_alignment, borders):
                # Note [When an input is copied after all]
                copied_bytes += inputs[index].nbytes
                if placeholder is None:
                    clone = torch_internals.clone_preserve_strides(inputs[index].detach())
                    call[index], address = clone, clone.data_ptr()
                else:
                    copied[index] = inputs[index]
                    address = placeholder
            lies[index] = address
        if copied:
            lies |= self._fill(copied) or {}
        self.placeholder_bytes += copied_bytes
        moved = {index: address for index, address in lies.items() if address != addresses[index]}
        if not moved:
            return
        self._point(moved)
        self.moves += 1

    def _point(self, moved: Mapping[int, int]) -> None:
        try:
            self.pointer_bytes += self._pointers.point(moved)
            self.pending, self._launched = True, False
            for index, address in moved.items():
                self.addresses[index] = address
        except BaseException:
            for index in moved:
                self.addresses[index] = 0  # unknown: the next call writes them all again
            raise

    def rest(self, resting: bool) -> None:
        """Make the graph read inputs from their placeholders, if they have one, until `rest(False)` is called.

        The caller fills the placeholders. If an interrupt ends this, call it again before the next `follow`.
        """
        checks = [one for one in self._all_checks if one[2] is None] if resting else self._all_checks
        self._checks = checks
        self.indices = [one[0] for one in checks]
        moved = {
            index: placeholder
            for index, _, placeholder, _ in self._all_checks
            if placeholder is not None and self.addresses[index] != placeholder
        }
        if resting and moved:
            self._point(moved)

    @property
    def resting(self) -> frozenset[int]:
        """Return the inputs that are read from their placeholders because of `rest`."""
        return frozenset(one[0] for one in self._all_checks) - frozenset(self.indices)

    def launched(self) -> None:
        """Note that the graph was launched, after each launch."""
        if self.pending:
            self.pending, self._launched = False, True


def is_readable(one: TrackedInput, address: int, overwritten: MemoryRanges) -> bool:
    """Return whether a graph may read this input at `address`. Note [When an input is copied after all]."""
    return _reads_in_place(address, one.size_bytes, one.alignment_bytes - 1, overwritten.borders)


def _reads_in_place(address: int, size: int, below_alignment: int, borders: Sequence[int]) -> bool:
    """Return whether a graph may read `size` bytes at `address`. Note [When an input is copied after all]."""
    below = bisect_right(borders, address)
    return not (address & below_alignment or below & 1 or bisect_left(borders, address + size) != below)
