"""Return results of a recorded step in memory of their own.

A result is in the memory of the graph, and the next launch overwrites it. So it is copied out, with one fused copy for
each dtype. A parameter, or any other tensor from before the call, is returned itself. For an argument, the caller's
tensor is returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.inputs import copy_all, is_plain
from optimizations.capture.signature import flatten, replaced
from optimizations.capture.step.observer import StepRefused, storage
from optimizations.graph.memory import overlaps
from optimizations.report.steps import Refusal
from optimizations.torch_internals.geometry import is_lazy_view

_VIEW = Refusal(
    "returns a view of an argument, and a graph has a copy of the argument",
    "return a copy of it (`clone()`), or make the view after the step",
)
_LAYOUT = Refusal(
    "returns a tensor that is no plain one: its elements share memory, or it is sparse, quantized, a lazy conjugate or "
    "of a class of its own",
    "return a plain copy of it: `contiguous()`, `to_dense()`, `dequantize()`, `resolve_conj()`, `resolve_neg()`",
)


class Outputs:
    """Copy results out of the graph's memory.

    Args:
        returned: the results of the recording.
        placeholders: the placeholders of its inputs.
        static: storages that do not belong to the graph.

    Attributes:
        static: storages of results that are tensors from before the call, or views of them.
        copied: the tensors of the graph from which results are copied.

    Raises:
        StepRefused: a result cannot be copied as it is.
    """

    def __init__(self, returned: Any, placeholders: Sequence[torch.Tensor], static: Iterable[int]) -> None:
        tensors: list[torch.Tensor] = []
        flatten(returned, tensors)
        self._nest = returned if not tensors else replaced(returned, iter([tensor.detach() for tensor in tensors]))
        arguments, given = set(map(id, placeholders)), set(map(storage, placeholders)) - {0}
        static = set(static) - {0}  # 0: tensors without memory
        made: dict[int, torch.Tensor] = {}
        there: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            if id(tensor) in arguments:
                continue
            if storage(tensor) in given:
                raise StepRefused(_VIEW)
            if storage(tensor) not in static and (not _is_plain(tensor) or overlaps(tensor)):
                raise StepRefused(_LAYOUT)
            (there if storage(tensor) in static else made)[id(tensor)] = tensor
        self._statics, self.static = list(there.values()), set(map(storage, there.values()))
        self.copied = [tensor.detach() for tensor in made.values()]
        self._fresh_copies = list(map(_allocator, self.copied))
        # Places in inputs, copies and tensors from before the call.
        places = {key: place for place, key in enumerate([*map(id, placeholders), *made, *there])}
        self._plan = [places[id(tensor)] for tensor in tensors]
        self._single = len(tensors) == 1 and tensors[0] is returned and bool(made)
        # All results are copies, in order: the prepared tensors can be returned directly.
        in_order = range(len(placeholders), len(placeholders) + len(tensors))
        self._as_prepared = bool(tensors) and self._plan == list(in_order)

    def prepare(self) -> list[torch.Tensor]:
        """Allocate tensors for the next launch's results, before the launch, because this may run out of memory."""
        return [allocate() for allocate in self._fresh_copies]

    def copy_out(self, fresh: list[torch.Tensor]) -> None:
        """Copy results to `fresh`, directly after the launch, before gradients are published."""
        if self.copied:
            copy_all(fresh, self.copied)

    def take(self, inputs: Sequence[torch.Tensor], fresh: list[torch.Tensor]) -> Any:
        """Return the results of a call with these inputs, after `copy_out` to `fresh`."""
        if self._as_prepared:
            return fresh[0] if self._single else replaced(self._nest, iter(fresh))
        known = [*inputs, *fresh, *self._statics]
        return replaced(self._nest, (known[place] for place in self._plan))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided and dense, without lazy conjugation, negation or quantization."""
    return is_plain(tensor) and not (is_lazy_view(tensor) or tensor.is_quantized)


def _allocator(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that allocates a tensor with the shape, strides and dtype of another one.

    With one GPU no dispatcher is needed: PyTorch's function for generated code allocates on the current device.
    """
    shape, stride = tuple(like.shape), like.stride()
    if like.device.type == "cuda" and torch.cuda.device_count() == 1:
        return functools.partial(torch_internals.empty_strided_cuda, shape, stride, like.dtype)
    return functools.partial(torch.empty_strided, shape, stride, dtype=like.dtype, device=like.device)
