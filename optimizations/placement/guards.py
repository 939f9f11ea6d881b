"""Detect in each call that an attribute changed, by its bytes.

Note [Pinned attributes]
A copy into a pinned tensor may be in flight when a call starts, and eager PyTorch's own copy to the GPU waits for it in
stream order. A comparison on the host would read the old bytes. So pinned attributes are not compared: values that
depend on one are copied in each call, in stream order (see `feeds`). Whether an attribute is pinned is queried at first
and whenever its address changes. The query takes about 1 us, and tensors of rank 0 are often new in each call; the
allocator reuses few addresses for them, so these are stored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations.graph.memory import size_bytes

COMPARED_IN_PLACE_BYTES = 4096
"""Up to this size, comparing a copy in Python is faster than calling the C library."""

ADDRESSES_LIMIT = 64
"""At most this many addresses of one attribute of rank 0 are stored as not pinned; then they are cleared."""

_compare: Any = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_compare.restype = ctypes.c_int

_Bytes = Callable[[int], Any]
"""Makes an object whose `raw` are the bytes at an address."""


@dataclass(frozen=True, slots=True)
class Checks:
    """Hold the recorded values of attributes, to check that they are unchanged.

    `scalars` are of rank 0, and may be new tensors in each call: (argument, reader of the bytes, recorded bytes,
    addresses that are not pinned).
    `small` and `large` are compared at their address, and checked again if it changes: (argument, address, reader or
    number of bytes, recorded bytes). `always`: an attribute is pinned, so that no comparison is possible.
    """

    scalars: tuple[tuple[int, _Bytes, bytes, set[int]], ...] = ()
    small: tuple[tuple[int, int, _Bytes, bytes], ...] = ()
    large: tuple[tuple[int, int, int, bytes], ...] = ()
    always: bool = False

    def fail(self, arguments: Sequence[Any]) -> bool:
        for index, at, before, known in self.scalars:
            address = arguments[index].data_ptr()
            if at(address).raw != before or (address not in known and _turns_up_pinned(arguments[index], known)):
                return True
        for index, address, at, before in self.small:
            found = arguments[index].data_ptr()
            if found != address or at(found).raw != before:
                return True
        for index, address, size, before in self.large:
            found = arguments[index].data_ptr()
            if found != address or _compare(found, before, size):
                return True
        return self.always

    @classmethod
    def joined(cls, parts: Iterable[Checks]) -> Checks:
        """Return the checks of all `parts`, each attribute once."""
        parts = list(parts)
        return cls(
            tuple({check[0]: check for part in parts for check in part.scalars}.values()),
            tuple({check[0]: check for part in parts for check in part.small}.values()),
            tuple({check[0]: check for part in parts for check in part.large}.values()),
            any(part.always for part in parts),
        )


def checks_for(attributes: Iterable[tuple[int, torch.Tensor]]) -> Checks:
    """Record the current values of attributes, each (argument, tensor).

    No byte of a pinned tensor is read; see Note [Pinned attributes].
    """
    scalars, small, large = [], [], []
    always = False
    for index, tensor in attributes:
        size = size_bytes(tensor)
        address = tensor.data_ptr()
        if is_pinned(tensor):
            always = True
        elif tensor.dim() == 0:
            at = (ctypes.c_char * size).from_address
            scalars.append((index, at, at(address).raw, {address}))
        elif 0 < size <= COMPARED_IN_PLACE_BYTES:
            at = (ctypes.c_char * size).from_address
            small.append((index, address, at, at(address).raw))
        elif size:
            large.append((index, address, size, ctypes.string_at(address, size)))
    return Checks(tuple(scalars), tuple(small), tuple(large), always)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether copies from and into `tensor` may be asynchronous."""
    return tensor.is_pinned()


def _turns_up_pinned(tensor: torch.Tensor, known: set[int]) -> bool:
    """Return whether a tensor at an address that is not `known` is pinned; if it is not, add the address to `known`."""
    if is_pinned(tensor):
        return True
    if len(known) >= ADDRESSES_LIMIT:
        known.clear()
    known.add(tensor.data_ptr())
    return False
