"""Recognise casts that autocast keeps: made in one call, and read again as long as the region around them lasts.

Inside of an autocast region PyTorch casts a weight once and reads that cast until the outermost region is left, also
after the weight was written. Where a region surrounds several calls of a step, the calls after the first read casts
that they did not make. A recording of such a call reads these tensors too, which is what eager does, and serves until
the region is left.

Note [The mark]. Nothing tells when PyTorch forgets the casts. So a cast of a tensor of our own is put among them, and a
weak reference to its memory says whether it is there still.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from optimizations import torch_internals

_CAST_TYPES = (torch.bfloat16, torch.float16)


def inside_region() -> bool:
    """Return whether an autocast region surrounds this call, or `set_autocast_enabled` switched autocast on."""
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    on = depth > 0 or torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    return on and torch.is_autocast_cache_enabled()


def may_be_kept(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of unknown origin may be a cast that autocast keeps."""
    if tensor.dtype not in _CAST_TYPES:
        return False
    made_by = tensor.grad_fn
    return type(made_by).__name__ == "ToCopyBackward0" if made_by is not None else tensor.is_leaf


def is_cast_of_a_weight(name: str, args: Any) -> bool:
    """Return whether an operator is a cast that autocast may keep."""
    return name == "aten._to_copy.default" and args[0].is_leaf and args[0].requires_grad


class RegionMark:
    """Tell whether an autocast region lasts. Made inside of it. See Note [The mark]."""

    def __init__(self, device: torch.device) -> None:
        self._leaf = torch.zeros(1, 1, device=device, requires_grad=True)
        casts = _Casts()
        torch.autocast_increment_nesting()  # the region below is never the outermost, after which casts are forgotten
        try:
            with torch.enable_grad(), torch.autocast(device.type, dtype=torch.bfloat16), casts:
                torch.mm(self._leaf, self._leaf)
        finally:
            torch.autocast_decrement_nesting()
        self._cast = casts.found

    def lasts(self) -> bool:
        """Return whether the region has not been left."""
        return self._cast is not None and not self._cast.expired()


class _Casts(torch_internals.TorchDispatchMode):
    found: StorageWeakRef | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_cast_of_a_weight(str(func), args):
            self.found = StorageWeakRef(result.untyped_storage())
        return result
