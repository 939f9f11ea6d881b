"""Return results of a graph where they lie, and give those that are still held memory of their own.

The next launch of the graph writes its results to the same memory, and so may a launch of any other in its pool: what
one graph computes on its way may lie where another, captured later, has its results. A tensor that the caller still
holds then gets memory of its own before that, with its values. Views of it (DLPack's, too), results that share memory,
and an autograd graph whose backward did not run, cannot be given memory of their own: a call that would overwrite them
runs without its graph. So does one after a result was resized: it has other memory now, and the graph would go on
writing unread memory.
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
        static: the results where the graph writes them.
        read_back: those that the backward reads, by index. Each tensor over one has a version of its own.
        outside: those in memory of the program, such as a weight; they are left as they are.

    Attributes:
        out: what the caller got and may still lie here.
        copied: the program gets copies, which it asked for, or it held a view of a result: as the variables of a loop
            do, which would hold one in each call.
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
        """Return tensors over the graph's results, or copies; those in memory of the program follow writes there."""
        return tuple(
            tensor.detach().clone()
            if self.copied and index not in self._outside
            else _over(tensor)
            if index in self.read_back
            else tensor.detach()
            for index, tensor in enumerate(self.static)
        )

    def move_out(self) -> bool:
        """Give what is still held its own memory. Where that cannot be, return False, and copies from then on."""
        moved = self._move_out()
        self.copied = self.copied or not moved
        return moved

    def _move_out(self) -> bool:
        if list(map(_place, self._own)) != self._written_at:
            return False
        if not self._idle:  # before the first launch only Encore holds them
            self._idle = list(map(_uses, self._own))
        alive = [tensor for reference in self.out if (tensor := reference()) is not None]
        held = [tensor for tensor in alive if _place(tensor) in self._written_at]
        places = Counter(map(_place, held))
        for tensor, idle in zip(self._own, self._idle, strict=True):
            if _uses(tensor) > idle + places[_place(tensor)]:
                return False
        # DLPack holds the tensor, and its consumer the address: memory of its own would part the two.
        if any(count > 1 for count in places.values()) or any(
            torch_internals.tensor_use_count(one) > 1 for one in held
        ):
            return False
        for tensor in held:
            tensor.data = tensor.detach().clone()
        self.out = []
        return True


def version_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that counts the writes to another one, and does not hold its memory."""
    found = tensor.detach()
    found.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return found


def _over(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the memory of another, whose writes are counted apart from the other's."""
    if is_lazy_view(tensor):
        return tensor.detach()
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _uses(tensor: torch.Tensor) -> int:
    """Count what holds its memory, in C++, and in Python by the storage alone, which C++ does not count."""
    storage = tensor.untyped_storage()
    count: int = torch_internals.storage_use_count(storage._cdata)
    return count + sys.getrefcount(storage)
