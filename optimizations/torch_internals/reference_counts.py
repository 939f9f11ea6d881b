"""Reference counts of many tensors and of their storages, read in bulk.

Python and PyTorch tell one count in each call, and a tensor has four: of its object in Python, of what C++ holds of it,
and the same of its storage. Each is a word in memory at a known distance from an address that PyTorch tells. NumPy
gathers such words in one call, 5 ns each. Whether the words are where they are looked for is tried out once, with a
tensor of which all holders are known. Where they are not, as in another build of Python, they are asked for one by one.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from optimizations import torch_internals

_WORD = 8
_TOP = 1 << 47
"""Bytes of address space that a process has, unless it asks for more."""

COUNTS = 4
"""Of each tensor: its object in Python, itself, its storage, and the storage's object in Python."""


class ReferenceCounts:
    """The counts of these tensors, which have storages. It holds a reference to each tensor and to each storage.

    Attributes:
        now: gives the words, `COUNTS` for each tensor, in their order. A word is another one where a count is.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        self._storages = tuple([tensor.untyped_storage() for tensor in self.tensors])
        self.now = self._gathered() if _can_be_read() else self._asked_for()

    def _gathered(self) -> Callable[[], Any]:
        addresses = [
            address
            for tensor, storage in zip(self.tensors, self._storages, strict=True)
            for address in (id(tensor), tensor._cdata + _WORD, storage._cdata + _WORD, id(storage))
        ]
        if any(address % _WORD or not _WORD <= address < _TOP - 8 * _WORD for address in addresses):
            return self._asked_for()
        places = numpy.array([address // _WORD - 1 for address in addresses], dtype=numpy.intp)
        return functools.partial(_memory().take, places)

    def _asked_for(self) -> Callable[[], Any]:
        both = list(zip(self.tensors, self._storages, strict=True))
        cells = [storage._cdata for storage in self._storages]

        def ask() -> Any:
            found: list[int] = []
            for index, address in enumerate(cells):
                found += (
                    sys.getrefcount(both[index][0]),
                    torch_internals.tensor_use_count(both[index][0]),
                    torch_internals.storage_use_count(address),
                    sys.getrefcount(both[index][1]),
                )
            return numpy.array(found, dtype=numpy.int64)

        return ask


@functools.cache
def _memory() -> Any:
    """The words of this process from the second on: NumPy takes an array at address 0 for none."""
    words: Any = (ctypes.c_int64 * (_TOP // _WORD - 8)).from_address(_WORD)
    return numpy.frombuffer(words, dtype=numpy.int64)


@functools.cache
def _can_be_read() -> bool:
    """Whether the words are counts, and of what they should be."""
    if sys.maxsize < _TOP or sys.implementation.name != "cpython":
        return False
    with torch.inference_mode(False):
        tensor = torch.zeros(1, device="cpu")
        storage = tensor.untyped_storage()
        places = [id(tensor), tensor._cdata + _WORD, storage._cdata + _WORD, id(storage)]
        read = [ctypes.c_uint32.from_address(place) for place in places]  # a count may share its word with others

        def changed_by(hold: Callable[[], Any]) -> list[int]:
            before = [one.value for one in read]
            held = hold()
            after = [one.value for one in read]
            del held
            return [new - old for old, new in zip(before, after, strict=True)]

        holder = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        again = changed_by(lambda: tensor), changed_by(lambda: tensor.detach()), changed_by(lambda: storage)
        in_a_grad = changed_by(lambda: setattr(holder, "grad", tensor))
    return again == ([1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]) and in_a_grad[1] == 1


@functools.cache
def unheld() -> tuple[Any, Any]:
    """The words of a tensor that nothing holds, and what is added where it is a `.grad`.

    Its storage has been asked for. Each reference in Python to the tensor, or to that storage, adds 1.
    """
    with torch.inference_mode(False):
        holder = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        counts = ReferenceCounts([torch.zeros(1, device="cpu")])
    alone = counts.now()
    holder.grad = counts.tensors[0]
    in_a_grad = counts.now()
    return alone - numpy.array([1, 0, 0, 1]), in_a_grad - alone
