"""Tell whether a tensor is held by nothing but a list, so that its memory can be taken from it unseen."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import TypeGuard

import torch

from optimizations import torch_internals


def have_no_other_reference(found: Sequence[torch.Tensor | None], *, as_gradients: bool) -> list[bool]:
    """Return, for each tensor in a list, whether only the list holds it. `as_gradients`: the list and a `.grad`."""
    with torch.inference_mode(False):
        parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        parameter.grad = torch.zeros(1, device="cpu")
        known = [parameter.grad]
        if not as_gradients:
            parameter.grad = None
    expected = _holders(known, 0)
    return [found[index] is not None and _holders(found, index) == expected for index in range(len(found))]


def _holders(found: Sequence[torch.Tensor | None], index: int) -> tuple[int, ...] | None:
    """Return the counts of references to a tensor of a list. It is not bound to a name here, which would count."""
    if not is_plain(found[index]):
        return None
    storage = untyped_storage(found[index])
    return (
        sys.getrefcount(found[index]),
        weakref.getweakrefcount(found[index]),
        torch_internals.tensor_use_count(found[index]),
        torch_internals.storage_use_count(storage._cdata),
        sys.getrefcount(storage),
    )


def is_plain(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether it has a storage, and is nothing but a tensor."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested


def untyped_storage(tensor: torch.Tensor | None) -> torch.UntypedStorage:
    """Return the storage of a tensor which is there."""
    assert tensor is not None
    return tensor.untyped_storage()
