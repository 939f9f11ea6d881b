"""Copy gradients: those that a program holds, and into the places of those, in as few launches as can be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optimizations.capture.inputs import copy_all
from optimizations.graph.memory import size_bytes
from optimizations.lazy_view import is_lazy_view


def clones(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of these, one of each. A copy of its own for each takes a launch for each."""
    if any(map(is_lazy_view, tensors)):
        return [one.detach().clone() for one in tensors]
    made = [torch.empty_like(one, requires_grad=False) for one in tensors]
    copy_all(made, tensors)
    return made


def copy_over(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensor by tensor, of which each looks as the other, or is a copy of it.

    Those that stand for conjugates, or negatives, are no members of a list of targets. Of an expanded tensor, such as
    the gradient of a sum, each element is written once.
    """
    if any(0 in target.stride() for target in targets):
        strides = [target.stride() for target in targets]
        targets, sources = ([*map(_once, some, strides)] for some in (targets, sources))
    lazy = [is_lazy_view(target) for target in targets]
    for target, source, alone in zip(targets, sources, lazy, strict=True):
        if alone:
            copy_all([target], [source])
    copy_all(
        [target for target, alone in zip(targets, lazy, strict=True) if not alone],
        [source for source, alone in zip(sources, lazy, strict=True) if not alone],
    )


def _once(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return the part in which each element is there once, of a tensor that is expanded where these strides are 0."""
    for dimension, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.detach().narrow(dimension, 0, 1)
    return tensor


def copy_in(memory: dict[int, torch.UntypedStorage], gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy of a part of a buffer; those of one are parts of one again. `memory`: copies of buffers by the
    address of these."""
    if is_lazy_view(gradient):
        return gradient.detach().clone()
    storage = gradient.untyped_storage()
    copy = memory.get(storage.data_ptr())
    if copy is None:
        copy = memory[storage.data_ptr()] = storage.clone()
    made = torch.empty(0, dtype=gradient.dtype, device=gradient.device)
    return made.set_(copy, gradient.storage_offset(), gradient.shape, gradient.stride())


def is_a_part(gradient: torch.Tensor) -> bool:
    """Return whether it lies in a larger buffer."""
    return gradient.untyped_storage().nbytes() > size_bytes(gradient)


def copied(found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return copies of these, one where several are the same."""
    copies = {id(gradient): gradient.clone() for gradient in found if gradient is not None}
    return [None if gradient is None else copies[id(gradient)] for gradient in found]
