"""Read the graph that autograd recorded of a function: leaves, older tensors, saved tensors. Find hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from optimizations import torch_internals

_RAW = "_raw_saved_"
"""The prefix of a node's attributes that hold its saved tensors, not unpacked."""

_OF_MODULES = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
)
_OF_OPTIMIZERS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def is_of_leaf(node: Any) -> bool:
    """Return whether an autograd node accumulates the gradient of a leaf, its `variable`. A custom function may have a
    `variable` too, but has next functions."""
    return not node.next_functions and hasattr(node, "variable")


def _reached(nodes: Iterable[Any], since: int = 0) -> Iterator[Any]:
    """Yield these autograd nodes and all that their gradients reach, but none beyond a node from before `since`."""
    seen: set[Any] = {None}
    waiting = list(nodes)
    while waiting:
        if (node := waiting.pop()) in seen:
            continue
        seen.add(node)
        yield node
        if node._sequence_nr() >= since:  # that of leaves is the highest
            waiting += [before for before, _ in node.next_functions]


def recorded_of(outputs: Sequence[torch.Tensor], since: int) -> tuple[list[torch.Tensor], bool, set[int]]:
    """Read what autograd recorded of a function that began at `since` (`next_sequence_number`) and returned `outputs`.

    Tensors of checkpoints are not recomputed for it.

    Returns:
        The tensors that accumulate gradients; whether the graph continues to tensors from before the function; the
        addresses of the storages that its backward reads, except those that saved-tensor hooks (checkpoints) replace.
    """
    leaves = {id(one): one for one in outputs if one.grad_fn is None and one.requires_grad}
    saved: set[int] = set()
    older = False
    for node in _reached((output.grad_fn for output in outputs), since):
        if is_of_leaf(node):
            leaves[id(node.variable)] = node.variable
        elif node._sequence_nr() < since:
            older = True
        else:
            with torch_internals.disable_current_modes():  # some do not take saved numbers
                saved |= set(_saved_by(node))
    return list(leaves.values()), older, saved


def depending_on(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[frozenset[int]]:
    """Return for each leaf the indices of the outputs whose backward reaches it."""
    reached = [
        {id(output), *(id(node.variable) for node in _reached([output.grad_fn]) if is_of_leaf(node))}
        for output in outputs
    ]
    return [frozenset(index for index, found in enumerate(reached) if id(leaf) in found) for leaf in leaves]


def leads_to_hooks(node: Any) -> bool:
    """Return whether the gradient that an autograd node receives reaches a leaf with gradient hooks."""
    return any(is_of_leaf(one) and one.variable._backward_hooks for one in _reached([node]))


def _saved_by(node: Any) -> Iterator[int]:
    """Yield the addresses of storages that a node saved, without unpacking. Unpacking would return a new object for a
    tensor with hooks, without the attributes that the program set on it and that its own backward may use."""
    for name in dir(node):
        if not name.startswith(_RAW):
            continue
        held: Any = None
        with contextlib.suppress(RuntimeError, AttributeError):
            held = getattr(node, name)
        for one in held if isinstance(held, (list, tuple)) else (held,):
            with contextlib.suppress(RuntimeError, AttributeError):  # nothing saved, or a tensor without storage
                if one.unpack_hook is None:
                    yield one.data.untyped_storage().data_ptr()


@contextlib.contextmanager
def without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Keep `torch.autograd.grad` from calling the gradient hooks of these tensors in the block."""
    held = [(tensor, tensor._backward_hooks) for tensor in tensors if tensor._backward_hooks]
    try:
        for tensor, _ in held:
            tensor._backward_hooks = None
        yield
    finally:
        for tensor, hooks in held:
            tensor._backward_hooks = hooks


def hooks_registered() -> int:
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
