"""Return results of a graph without a copy, and move results that are still referenced before they are overwritten.

The next launch of the graph writes its results to the same memory. A result that the caller still references is first
moved to its own memory. Views of a result (also through DLPack), results that share memory, and
results with an autograd graph whose backward did not run cannot be moved. A call that would overwrite them runs without
its graph. So does a call after a result was resized: the result has different memory then, and nothing would read what
the graph writes.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Collection, Sequence

import torch

from optimizations import torch_internals
from optimizations.torch_internals.geometry import is_lazy_view


class StaticResults:
    """Track the results of one graph, `static`, and the tensors over them that the caller got.

    Args:
        static: the results, in the memory that the graph writes.
        read_back: indices of results that the backward reads. Each returned tensor has a separate version counter.
        outside: indices of results in the program's memory, such as a weight; they are not moved.

    Attributes:
        out: returned tensors that may still be in the graph's memory.
        copied: the program gets copies. It requested this, or it referenced a view of a result during a call, which
            the variables of a loop would do on every call.
    """

    def __init__(
        self, static: Sequence[torch.Tensor], read_back: Sequence[int], outside: Collection[int], *, copied: bool
    ) -> None:
        self.static, self.copied = list(static), copied
        self.read_back = () if copied else tuple(read_back)
        self._outside = frozenset(outside)
        self._own = [tensor for index, tensor in enumerate(static) if index not in outside]
        self._written_at = list(map(_place, self._own))
        self.out: list[weakref.ref[torch.Tensor]] = []
        self._idle: list[int] = []

    def over(self) -> tuple[torch.Tensor, ...]:
        """Return aliases or copies of the graph's results. Results in the program's memory are always aliases."""
        return tuple(
            tensor.detach().clone()
            if self.copied and index not in self._outside
            else _over(tensor)
            if index in self.read_back
            else tensor.detach()
            for index, tensor in enumerate(self.static)
        )

    def move_out(self) -> bool:
        """Move results that are still referenced to new memory. Return False if impossible."""
        if list(map(_place, self._own)) != self._written_at:
            return False
        if not self._idle:  # before the first launch only Encore references them
            self._idle = list(map(_uses, self._own))
        alive = [tensor for reference in self.out if (tensor := reference()) is not None]
        held = [tensor for tensor in alive if _place(tensor) in self._written_at]
        places = Counter(map(_place, held))
        for tensor, idle in zip(self._own, self._idle, strict=True):
            if _uses(tensor) > idle + places[_place(tensor)]:
                return False
        # DLPack references the tensor, and its consumer the address: after a move the two would differ.
        if any(count > 1 for count in places.values()) or any(
            torch_internals.tensor_use_count(one) > 1 for one in held
        ):
            return False
        for tensor in held:
            tensor.data = tensor.detach().clone()
        self.out = []
        return True


def _over(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the memory of another one and a separate version counter."""
    if is_lazy_view(tensor):
        return tensor.detach()
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _uses(tensor: torch.Tensor) -> int:
    """Return the references to the storage in C++ plus those to its Python object, which C++ does not count."""
    storage = tensor.untyped_storage()
    count: int = torch_internals.storage_use_count(storage._cdata)
    return count + sys.getrefcount(storage)
