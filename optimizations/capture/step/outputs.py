"""Return results of a recorded step that stay valid, and tensors of the caller as they are; bind what the step binds.

A result lies in the memory of the graph and the next launch overwrites it, so it is copied out, all of a dtype by one
fused copy. What is a parameter, or any tensor that was there before, is returned itself; what is an argument, or a view
of one, is the caller's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.inputs import copy_all
from optimizations.capture.signature import flatten, replaced
from optimizations.capture.step.host_state import Rebound
from optimizations.capture.step.observer import storage
from optimizations.graph.memory import data_of, overlaps
from optimizations.torch_internals.geometry import is_lazy_view


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its elements are what lies in its memory, and where its strides say."""
    strided = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return strided and not (is_lazy_view(tensor) or tensor.is_quantized)


class Outputs:
    """Copy results out. Made of what the recording returned, its placeholders, and storages that are not the graph's.

    Attributes:
        static: storages of results that are tensors from before the call, or views of such.
    """

    def __init__(self, returned: Any, placeholders: Sequence[torch.Tensor], static: Iterable[int]) -> None:
        tensors: list[torch.Tensor] = []
        flatten(returned, tensors)
        self._nest = returned if not tensors else replaced(returned, iter([tensor.detach() for tensor in tensors]))
        by_id = {id(placeholder): index for index, placeholder in enumerate(placeholders)}
        by_storage = {storage(placeholder): index for index, placeholder in enumerate(placeholders)}
        static = set(static) - set(by_storage) - {0}  # where tensors without elements lie, and what no storage tells of
        self._copied: list[torch.Tensor] = []
        self._plan: list[tuple[str, Any]] = []
        self.static: set[int] = set()
        copied: dict[int, int] = {}
        for tensor in tensors:
            if id(tensor) in by_id:
                self._plan.append(("input", by_id[id(tensor)]))
            elif storage(tensor) in by_storage and storage(tensor):
                index = by_storage[storage(tensor)]
                self._plan.append(("view", (index, *view_of(tensor, placeholders[index]))))
            elif storage(tensor) in static:
                self._plan.append(("static", tensor))
                self.static.add(storage(tensor))
            else:
                if id(tensor) not in copied:
                    copied[id(tensor)] = len(self._copied)
                    self._copied.append(tensor.detach())
                self._plan.append(("copy", copied[id(tensor)]))
        # Elements that share memory cannot be written one by one: the memory from the first to the last is copied.
        self._as_bytes = [_is_plain(one) and overlaps(one) for one in self._copied]
        self._sources = [data_of(one) if run else one for one, run in zip(self._copied, self._as_bytes, strict=True)]
        self._fresh_copies = list(map(_allocator, self._copied))
        self._single = len(tensors) == 1 and tensors[0] is returned and bool(self._copied)
        # Every result is copied, in order: what was prepared for them is what is given.
        self._as_prepared = bool(tensors) and self._plan == [("copy", place) for place in range(len(self._copied))]

    def prepare(self) -> list[torch.Tensor]:
        """Return memory for copies of the next launch's results. If there is not enough, nothing was done yet."""
        return [allocate() for allocate in self._fresh_copies]

    def copied(self) -> list[torch.Tensor]:
        """Return the tensors of the recording that results are copies of."""
        return self._copied

    def copy_out(self, fresh: list[torch.Tensor]) -> None:
        """Copy results, at once after the launch that `fresh` was prepared for. One may lie where a gradient lies,
        whose content from before is put back then."""
        if self._copied:
            targets = [data_of(one) if run else one for one, run in zip(fresh, self._as_bytes, strict=True)]
            copy_all(targets, self._sources)

    def take(self, inputs: Sequence[torch.Tensor], fresh: list[torch.Tensor]) -> Any:
        """Return the results of the launch before, for a call with these inputs, after `copy_out`. `fresh` was prepared
        for that launch."""
        if self._as_prepared:
            return fresh[0] if self._single else replaced(self._nest, iter(fresh))
        return replaced(self._nest, iter([_given(kind, what, fresh, inputs) for kind, what in self._plan]))


def _allocator(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what allocates memory like that of a tensor, which the result lies in as the tensor in its own.

    An expanded result has no more memory than it is expanded from. On a machine with one GPU that takes no dispatcher:
    PyTorch's function for generated code allocates on the current device, which is not asked.
    """
    if not _is_plain(like):
        return functools.partial(torch.empty_like, like)
    shape, stride = tuple(like.shape), like.stride()
    if like.device.type == "cuda" and torch.cuda.device_count() == 1:
        return functools.partial(torch_internals.empty_strided_cuda, shape, stride, like.dtype)
    return functools.partial(torch.empty_strided, shape, stride, dtype=like.dtype, device=like.device)


def _given(kind: str, what: Any, copies: list[torch.Tensor], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    if kind == "copy":
        return copies[what]
    if kind == "input":
        return inputs[what]
    if kind == "static":
        static: torch.Tensor = what
        return static
    index, *view = what
    return view_like(inputs[index], *view)


def view_of(tensor: torch.Tensor, base: torch.Tensor) -> tuple[Any, ...]:
    """Return how a tensor lies in the memory of another, for `view_like`.

    That is its shape, strides, offset from there, dtype, and whether it stands for conjugates or negatives of what lies
    there.
    """
    offset = tensor.storage_offset() - base.storage_offset()
    return tensor.shape, tensor.stride(), offset, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def view_like(
    base: torch.Tensor, shape: Any, stride: Any, offset: int, dtype: torch.dtype, conjugates: bool, negatives: bool
) -> torch.Tensor:
    """Return the view that `view_of` has described, of another base of the same kind. `base` is no lazy view."""
    base = base.detach()
    found = base if base.dtype == dtype else base.view(dtype)
    found = found.as_strided(shape, stride, base.storage_offset() + offset)
    if conjugates:
        found = found.conj()
    if negatives:
        found = torch_internals.neg_view(found)
    return found


def _kind(held: Any) -> tuple[torch.Size, torch.dtype] | None:
    return (held.shape, held.dtype) if isinstance(held, torch.Tensor) else None


class BoundResults:
    """Bind the attributes and variables that a step binds to what a launch made, in the order of its results.

    What entries held and were bound to is let go of. What they hold may be another tensor of that shape and dtype,
    which the step's code may check.
    """

    def __init__(self, entries: Sequence[Rebound] = ()):
        nothing = torch.empty(0, device="meta")
        self._entries = [replace(entry, old=None, new=nothing) for entry in entries]
        self._kinds = [_kind(entry.old) for entry in entries]

    def __len__(self) -> int:
        return len(self._entries)

    def fit(self) -> bool:
        """Return whether each entry holds something of the kind it held."""
        held = [entry.container.get(entry.key) for entry in self._entries]
        return all(
            now is None if kind is None else _kind(now) == kind for now, kind in zip(held, self._kinds, strict=True)
        )

    def bind(self, results: tuple[Any, tuple[Any, ...]]) -> Any:
        """Bind the second of these, one for each entry; return the first, what the step returned."""
        returned, values = results
        for entry, value in zip(self._entries, values, strict=True):
            entry.container.put(entry.key, value)
        return returned
