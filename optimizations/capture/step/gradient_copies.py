"""Copies of gradients: of those that a program holds, and in the places of those, in as few launches as can be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optimizations.capture.inputs import copy_all
from optimizations.captured.displaced import size_bytes


def clones(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of these, one of each. A copy of its own for each takes a launch for each."""
    if any(map(_is_lazy, tensors)):
        return [one.detach().clone() for one in tensors]
    made = [torch.empty_like(one, requires_grad=False) for one in tensors]
    copy_all(made, tensors)
    return made


def put_contents_back(kept: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """What each held. Those that stand for conjugates, or negatives, are no members of a list of targets."""
    lazy = [one for one in kept if _is_lazy(one[0])]
    others = [one for one in kept if not _is_lazy(one[0])]
    for one, before in lazy:
        copy_all([one], [before])
    copy_all([one for one, _ in others], [before for _, before in others])


def copy_in(memory: dict[int, torch.UntypedStorage], gradient: torch.Tensor) -> torch.Tensor:
    """A copy of a part of a buffer; those of one are parts of one again. `memory`: copies of buffers by the address of
    these."""
    if _is_lazy(gradient):
        return gradient.detach().clone()
    storage = gradient.untyped_storage()
    copy = memory.get(storage.data_ptr())
    if copy is None:
        copy = memory[storage.data_ptr()] = storage.clone()
    made = torch.empty(0, dtype=gradient.dtype, device=gradient.device)
    return made.set_(copy, gradient.storage_offset(), gradient.shape, gradient.stride())


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether it stands for conjugates or negatives of what lies in its memory."""
    return tensor.is_conj() or tensor.is_neg()


def is_a_part(gradient: torch.Tensor) -> bool:
    """Whether it lies in a larger buffer."""
    return gradient.untyped_storage().nbytes() > size_bytes(gradient)


def copied(found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Copies of these, one where several are the same."""
    copies = {id(gradient): gradient.clone() for gradient in found if gradient is not None}
    return [None if gradient is None else copies[id(gradient)] for gradient in found]
