"""Find hooks of tensors and global hooks, and count how many were ever registered."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from optimizations import torch_internals

_OF_MODULES = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
)
_OF_OPTIMIZERS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def registered() -> int:
    """Return how many hooks were ever registered on tensors, modules and optimizers."""
    return RemovableHandle.next_id


def global_hooks() -> list[dict[int, Any]]:
    """Return the dicts of hooks that all modules and all optimizers run."""
    modules: Any = torch_internals.module_hooks
    optimizers: Any = torch_internals.optimizer_hooks
    return [getattr(modules, name) for name in _OF_MODULES] + [getattr(optimizers, name) for name in _OF_OPTIMIZERS]


def tensor_hooks(tensor: torch.Tensor) -> list[dict[int, Any]]:
    """Return the dicts of a tensor's hooks: of its gradient, and after its gradient was added to."""
    return [held for held in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks) if held is not None]
