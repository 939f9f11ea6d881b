"""Return results of a graph where they lie, and give those that are kept memory of their own.

The next launch of the graph writes its results to the same memory, and so may a launch of any other in its pool: what
one graph computes on its way may lie where another, captured later, has its results. A tensor that is still held then
gets memory of its own before that, with its values. Views of it (DLPack's, too), and an autograd graph whose backward
did not run, cannot be given memory of their own; a forward that would overwrite them runs without its graph, and a
backward raises an error before anything is overwritten.

A program that resizes a result gives its storage other memory, and the graph would go on writing unread memory. So it
is not launched any more. A result without memory is a new tensor in each call, for its holder may give it some.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import torch

from optimizations import torch_internals
from optimizations.lazy_view import is_lazy_view


class StillInUse(RuntimeError):
    """Report that memory of a result is about to be written while something other than the result refers to it."""


class HandedOut:
    """Track the results of one graph, `static`, and the tensors over them that the caller got.

    `read_back`: those that the backward reads, by index. Each of these has a version of its own every time. `theirs`:
    those that lie in memory of the program, such as a weight; they are left as they are. `told` is called when some
    were given memory of their own, by copies on the current stream.
    """

    def __init__(
        self, static: Sequence[torch.Tensor], read_back: Sequence[int] = (), theirs: Collection[int] = ()
    ) -> None:
        self.read_back = tuple(read_back)
        self._static = list(static)
        self._theirs = frozenset(theirs)
        self._own = [tensor for index, tensor in enumerate(static) if index not in theirs]
        self._written_at = [tensor.untyped_storage().data_ptr() for tensor in self._own]
        self._addresses = set(self._written_at)
        self._handed: list[weakref.ref[torch.Tensor]] = []
        self._idle: list[int] = []
        self.rescued = 0
        self.told: Callable[[], None] = lambda: None

    def hand_out(self) -> tuple[torch.Tensor, ...]:
        """Return tensors over the graph's results."""
        return tuple(
            torch.empty_like(tensor)
            if not tensor.untyped_storage().data_ptr()
            else over(tensor)
            if index in self.read_back
            else tensor.detach()
            for index, tensor in enumerate(self._static)
        )

    def hand_out_copies(self) -> tuple[torch.Tensor, ...]:
        """Return copies of the graph's results; those in memory of the program follow writes there, as in eager."""
        handed = self.hand_out()
        own = iter(copies([tensor for index, tensor in enumerate(handed) if index not in self._theirs]))
        return tuple(tensor if index in self._theirs else next(own) for index, tensor in enumerate(handed))

    @property
    def are_out(self) -> bool:
        """Return whether the caller got results that may still lie here."""
        return bool(self._handed)

    @property
    def resized(self) -> bool:
        """Return whether a result lies elsewhere than the graph writes it, because it was resized."""
        return [tensor.untyped_storage().data_ptr() for tensor in self._own] != self._written_at

    @property
    def handed(self) -> Sequence[weakref.ref[torch.Tensor]]:
        """Return what the caller got that may still lie here."""
        return self._handed

    @property
    def static(self) -> Sequence[torch.Tensor]:
        """Return the results where they lie."""
        return self._static

    def remember(self, handed: Sequence[torch.Tensor]) -> None:
        """Remember what the caller got in the end."""
        self._handed = [weakref.ref(tensor) for tensor in handed]

    def leave(self) -> bool:
        """Give what is still held its own memory. Return False, and do nothing, where a view of a result is held, or
        its backward did not run."""
        if not self._idle:  # before the first launch only this object holds them
            self._idle = [_uses(tensor) for tensor in self._own]
        alive = [tensor for reference in self._handed if (tensor := reference()) is not None]
        places = Counter(tensor.untyped_storage().data_ptr() for tensor in alive)
        for tensor, idle in zip(self._own, self._idle, strict=True):
            if _uses(tensor) > idle + places[tensor.untyped_storage().data_ptr()]:
                return False
        held = [tensor for tensor in alive if tensor.untyped_storage().data_ptr() in self._addresses]
        # DLPack holds the tensor, and its consumer the address: memory of its own would part the two.
        if any(torch_internals.tensor_use_count(tensor) > 1 for tensor in held):
            return False
        for tensor, copy in zip(held, copies(held), strict=True):
            tensor.data = copy
            self.rescued += 1
        self._handed = []
        if held:
            self.told()
        return True

    def rescue(self) -> None:
        """Let the results leave before a backward.

        Raises:
            StillInUse: a view of a result is held, or its backward did not run.
        """
        if not self.leave():
            raise StillInUse(
                "a result of another call is still in use through a view, or because its backward did not run; "
                "clone what you keep, or pass outputs='copied' to graph_callables"
            )


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a copy of each. Those that share memory do so after it, too."""
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    shared = Counter(places)
    memory: dict[int, torch.UntypedStorage] = {}
    found = []
    for tensor, place in zip(tensors, places, strict=True):
        if shared[place] == 1 or not place:
            found.append(tensor.detach().clone())
            continue
        if place not in memory:
            memory[place] = tensor.untyped_storage().clone()
        copy = over(tensor.detach())
        copy.set_(memory[place], copy.storage_offset(), copy.shape, copy.stride())
        found.append(copy)
    return found


def version_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that counts the writes to another one, and does not hold its memory."""
    found = tensor.detach()
    found.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return found


def over(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the memory of another, whose writes are counted apart from the other's."""
    if is_lazy_view(tensor):
        return tensor.detach()
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _uses(tensor: torch.Tensor) -> int:
    """Count what holds its memory, in C++, and in Python by the storage alone, which C++ does not count."""
    storage = tensor.untyped_storage()
    count: int = torch_internals.storage_use_count(storage._cdata)
    return count + sys.getrefcount(storage)
