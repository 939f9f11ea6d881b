"""Reference counts of many tensors and of their storages, read in bulk.

Python and PyTorch tell one count in each call, and a tensor has four: of its object in Python, of what C++ holds of it,
and the same of its storage. Each is a word in memory at a known distance from an address that PyTorch tells. NumPy
gathers such words in one call, 5 ns each. Weak references are not among them: who has one does not keep the tensor.

What is read is memory of objects that the reader holds. Only the part in C++ may be exchanged for another, by
`torch.utils.swap_tensors`: so each object is asked first, in the same way, whether it still has the part that is read.
Then whether that still has its storage, which `.data =` exchanges: the tensor would be missing among the holders of the
one from before, and hide another. Whether the words are where they are looked for is tried out once, with a tensor of
which all holders are known. Where they are not, as in another build of Python, they are asked for one by one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from optimizations import torch_internals
from optimizations.torch_internals.memory_words import PART, WORD, Words, as_expected, can_be_read, read_behind, word

_COUNT = 4
"""Bytes of a count. PyTorch keeps that of weak references behind it, and Python its flags, or another half."""

COUNTS = 4
"""Of each tensor: its object in Python, itself, its storage, and the storage's object in Python."""


class ReferenceCounts:
    """The counts of these tensors, which have storages. It holds a reference to each tensor and to each storage.

    Attributes:
        storages: those that the tensors had then.
        now: gives the counts, `COUNTS` for each tensor, in their order. They are all 0 where a tensor's part in C++, or
            its storage, was exchanged for another. It holds what it reads.
        compared: of such counts, gives a function that tells whether `now` gives them. That holds what it reads, too.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        self.storages = tuple([tensor.untyped_storage() for tensor in self.tensors])
        find = _gathered if _can_be_read() else _asked_for
        self.now, self.compared = find(self.tensors, self.storages)


_Functions = tuple[Callable[[], Any], Callable[[Any], Callable[[], bool]]]
"""`now` and `compared`."""


def _gathered(tensors: tuple[torch.Tensor, ...], storages: tuple[torch.UntypedStorage, ...]) -> _Functions:
    objects = tensors, storages
    parts = Words(
        [id(one) + PART for some in objects for one in some], [one._cdata for some in objects for one in some]
    )
    cells = Words([one._cdata + _STORAGE for one in tensors], [one._cdata for one in storages])
    addresses = [
        address
        for tensor, storage in zip(*objects, strict=True)
        for address in (id(tensor), tensor._cdata + WORD, storage._cdata + WORD, id(storage))
    ]
    read = read_behind([parts, cells], addresses, _COUNT)

    def now() -> Any:
        # `objects` is never empty: it is named so that this function holds what it reads.
        found = read() if objects else None
        return numpy.zeros(len(addresses), dtype=numpy.int32) if found is None else found

    def compared(counts: Any) -> Callable[[], bool]:
        return as_expected(parts, cells, Words(addresses, counts, _COUNT), reads=objects)

    return now, compared


def _asked_for(tensors: tuple[torch.Tensor, ...], storages: tuple[torch.UntypedStorage, ...]) -> _Functions:
    cells = [storage._cdata for storage in storages]

    def now() -> Any:
        if any(one.untyped_storage()._cdata != cell for one, cell in zip(tensors, cells, strict=True)):
            return numpy.zeros(COUNTS * len(cells), dtype=numpy.int32)
        found: list[int] = []
        for index, address in enumerate(cells):
            found += (
                sys.getrefcount(tensors[index]),
                torch_internals.tensor_use_count(tensors[index]),
                torch_internals.storage_use_count(address),
                sys.getrefcount(storages[index]),
            )
        return numpy.array(found, dtype=numpy.int32)

    return now, lambda counts: lambda: bool((now() == counts).all())


_STORAGE = 2 * WORD
"""Where a tensor's part in C++ has the address of its storage: behind a table of functions and two counts."""


@functools.cache
def _can_be_read() -> bool:
    """Whether the words are what they should be."""
    return can_be_read(_are_found)


def _are_found() -> bool:
    with torch.inference_mode(False):
        tensor = torch.zeros(1, device="cpu")
        storage = tensor.untyped_storage()
        for one in (tensor, storage):
            if word(id(one) + PART) != one._cdata:
                return False
        if word(tensor._cdata + _STORAGE) != storage._cdata:
            return False
        now, _ = _gathered((tensor,), (storage,))

        def changed_by(hold: Callable[[], Any]) -> list[int]:
            before = now()
            held = hold()
            after = now()
            del held
            return [int(count) for count in after - before]

        holder = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        again = changed_by(lambda: tensor), changed_by(lambda: tensor.detach()), changed_by(lambda: storage)
        in_a_grad = changed_by(lambda: setattr(holder, "grad", tensor))
        tensor.data = torch.zeros(1, device="cpu")
        if now().any():
            return False
    return again == ([1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]) and in_a_grad[1] == 1


@functools.cache
def unheld() -> tuple[Any, Any, Any]:
    """The counts of a tensor that nothing holds, and what is added where it is a `.grad`, and where it is another, too.

    Its storage has been asked for. Each reference in Python to the tensor, or to that storage, adds 1.
    """
    with torch.inference_mode(False):
        holders = [torch.nn.Parameter(torch.zeros(1, device="cpu")) for _ in range(2)]
        counts = ReferenceCounts([torch.zeros(1, device="cpu")])
    alone = counts.now()
    holders[0].grad = counts.tensors[0]
    in_a_grad = counts.now()
    holders[1].grad = counts.tensors[0]
    in_another = counts.now()
    return alone - numpy.array([1, 0, 0, 1], dtype=numpy.int32), in_a_grad - alone, in_another - in_a_grad
