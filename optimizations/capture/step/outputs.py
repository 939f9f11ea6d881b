"""Return results of a recorded step in memory of their own, and bind the attributes that the step binds.

A result is in the memory of the graph, and the next launch overwrites it. So it is copied out, with one fused copy for
each dtype. A parameter, or any other tensor from before the call, is returned itself. For an argument or a view of one,
the caller's tensor is returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.inputs import copy_all, is_plain
from optimizations.capture.signature import flatten, replaced
from optimizations.capture.step.host_state import Rebound
from optimizations.capture.step.observer import storage
from optimizations.graph.memory import data_of, overlaps
from optimizations.torch_internals.geometry import is_lazy_view


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided and dense, without lazy conjugation, negation or quantization."""
    return is_plain(tensor) and not (is_lazy_view(tensor) or tensor.is_quantized)


class Outputs:
    """Copy results out of the graph's memory.

    Args:
        returned: the results of the recording.
        placeholders: the placeholders of its inputs.
        static: storages that do not belong to the graph.

    Attributes:
        static: storages of results that are tensors from before the call, or views of them.
    """

    def __init__(self, returned: Any, placeholders: Sequence[torch.Tensor], static: Iterable[int]) -> None:
        tensors: list[torch.Tensor] = []
        flatten(returned, tensors)
        self._nest = returned if not tensors else replaced(returned, iter([tensor.detach() for tensor in tensors]))
        by_id = {id(placeholder): index for index, placeholder in enumerate(placeholders)}
        by_storage = {storage(placeholder): index for index, placeholder in enumerate(placeholders)}
        static = set(static) - set(by_storage) - {0}  # 0: tensors without memory
        self._copied: list[torch.Tensor] = []
        self._statics: list[torch.Tensor] = []
        # Places in inputs, copies and tensors from before the call (counted from the end); and views of these.
        self._plan: list[tuple[int, Callable[[torch.Tensor], torch.Tensor] | None]] = []
        copied: dict[int, int] = {}
        for tensor in tensors:
            if id(tensor) in by_id:
                self._plan.append((by_id[id(tensor)], None))
            elif (place := storage(tensor)) and place in by_storage:
                index = by_storage[place]
                self._plan.append((index, _view_like(tensor, placeholders[index])))
            elif place in static:
                self._statics.insert(0, tensor)
                self._plan.append((-len(self._statics), None))
            else:
                if id(tensor) not in copied:
                    copied[id(tensor)] = len(placeholders) + len(self._copied)
                    self._copied.append(tensor.detach())
                self._plan.append((copied[id(tensor)], None))
        self.static = set(map(storage, self._statics))
        # Overlapping elements cannot be written one by one: the memory from the first to the last is copied.
        self._as_bytes = {index for index, one in enumerate(self._copied) if _is_plain(one) and overlaps(one)}
        self._sources = self._to_copy(self._copied)
        self._fresh_copies = list(map(_allocator, self._copied))
        self._single = len(tensors) == 1 and tensors[0] is returned and bool(self._copied)
        # All results are copies, in order: the prepared tensors can be returned directly.
        in_order = range(len(placeholders), len(placeholders) + len(tensors))
        self._as_prepared = bool(tensors) and [place for place, _ in self._plan] == list(in_order)

    def prepare(self) -> list[torch.Tensor]:
        """Allocate tensors for the next launch's results, before the launch, because this may run out of memory."""
        return [allocate() for allocate in self._fresh_copies]

    def copied(self) -> list[torch.Tensor]:
        """Return the tensors of the graph from which results are copied."""
        return self._copied

    def copy_out(self, fresh: list[torch.Tensor]) -> None:
        """Copy results to `fresh`, directly after the launch, before gradients are published."""
        if self._copied:
            copy_all(self._to_copy(fresh), self._sources)

    def _to_copy(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self._as_bytes:
            return tensors
        return [data_of(one) if index in self._as_bytes else one for index, one in enumerate(tensors)]

    def take(self, inputs: Sequence[torch.Tensor], fresh: list[torch.Tensor]) -> Any:
        """Return the results of a call with these inputs, after `copy_out` to `fresh`."""
        if self._as_prepared:
            return fresh[0] if self._single else replaced(self._nest, iter(fresh))
        known = [*inputs, *fresh, *self._statics]
        return replaced(
            self._nest, (known[index] if view is None else view(known[index]) for index, view in self._plan)
        )


def _allocator(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that allocates a tensor with the shape, strides and dtype of another one.

    An expanded result gets only the memory of the tensor it is expanded from. With one GPU no dispatcher is needed:
    PyTorch's function for generated code allocates on the current device.
    """
    if not _is_plain(like):
        return functools.partial(torch.empty_like, like)
    shape, stride = tuple(like.shape), like.stride()
    if like.device.type == "cuda" and torch.cuda.device_count() == 1:
        return functools.partial(torch_internals.empty_strided_cuda, shape, stride, like.dtype)
    return functools.partial(torch.empty_strided, shape, stride, dtype=like.dtype, device=like.device)


def _view_like(tensor: torch.Tensor, base: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that makes, of another base with the metadata of `base`, the view of it that `tensor` is."""
    shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset() - base.storage_offset()
    dtype, conjugates, negatives = tensor.dtype, tensor.is_conj(), tensor.is_neg()

    def view(base: torch.Tensor) -> torch.Tensor:
        found = base.detach() if base.dtype == dtype else base.detach().view(dtype)
        found = found.as_strided(shape, stride, base.storage_offset() + offset)
        found = found.conj() if conjugates else found
        return torch_internals.neg_view(found) if negatives else found

    return view


def _kind(held: Any) -> Any:
    """Return shape and dtype of a tensor, None for None, and for other values something that differs from these."""
    return (held.shape, held.dtype) if isinstance(held, torch.Tensor) else None if held is None else type(held)


class BoundResults:
    """Bind the attributes and variables that a step binds to results of a launch.

    Recorded tensors are not kept alive. Before a replay an entry may be a different tensor, but of the same shape and
    dtype, which the step's code may check.
    """

    def __init__(self, entries: Sequence[Rebound]) -> None:
        self._entries = [(entry.container, entry.key, _kind(entry.old)) for entry in entries]

    def fit(self) -> bool:
        """Return whether the shape and dtype of each entry, or None, are as recorded."""
        return all(_kind(container.get(key)) == kind for container, key, kind in self._entries)

    def bind(self, results: tuple[Any, tuple[Any, ...]]) -> Any:
        """Bind the second of these, one value for each entry; return the first, the results of the step."""
        returned, values = results
        for (container, key, _), value in zip(self._entries, values, strict=True):
            container.put(key, value)
        return returned
