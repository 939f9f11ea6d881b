"""Check in C++ whether tensors have the metadata that others had: one call for all of them.

Metadata are type, shape, strides, dtype, device, `requires_grad` and dispatch keys, which autocast and inference mode
change. The nodes are those of Dynamo's guards; `identity_guard` describes such a tree. Nothing is marked to be skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimizations import torch_internals

FEW = 16
"""Tensors up to which a check without a tree of nodes is faster."""


def same_metadata(tensors: Sequence[torch.Tensor]) -> Callable[[tuple[Any, ...]], bool]:
    """Return a function that checks whether a tuple holds tensors with the metadata of these, in the same order."""
    tree = torch_internals.RootGuardManager()
    tree.add_length_check_guard(len(tensors), ("length",), None)
    compare_metadata_of_each(tree, tensors)
    check: Callable[[tuple[Any, ...]], bool] = tree.check
    return check


def same_metadata_of_each(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return such a function for tensors that are passed one by one, as many as there are here."""
    if len(tensors) > FEW:
        check = same_metadata(tensors)
        return lambda *given: check(given)
    guards = torch_internals.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    check_each: Callable[..., bool] = guards.check
    return check_each


def compare_metadata_of_each(node: Any, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Let a node that stands for a tuple compare the metadata of these tensors in it. Return the node of each."""
    kind = torch_internals.GuardManagerType.GUARD_MANAGER
    found = []
    for index, tensor in enumerate(tensors):
        found.append(node.tuple_getitem_manager(index, f"tensor {index}", tensor, kind))
        compare_metadata(found[-1], f"tensor {index}", tensor)
    return found


def compare_metadata(node: Any, name: str, tensor: torch.Tensor) -> None:
    """Let a node compare the metadata of the tensor that it stands for."""
    node.add_tensor_match_guard(
        tensor,
        list(tensor.shape),
        list(tensor.stride()),
        name,
        (name,),
        None,
        type(tensor),
        torch_internals.dispatch_keys(tensor),
    )


def same_gradients(
    parameters: Sequence[torch.Tensor], expected: Sequence[torch.Tensor | None]
) -> Callable[[tuple[torch.Tensor, ...]], bool]:
    """Return a function that checks whether each parameter of a tuple has the very `.grad` that is expected.

    Its metadata is not compared. The caller keeps what is expected alive.
    """
    tree = torch_internals.RootGuardManager()
    kind = torch_internals.GuardManagerType.GUARD_MANAGER
    for index, (parameter, gradient) in enumerate(zip(parameters, expected, strict=True)):
        node = tree.tuple_getitem_manager(index, f"parameter {index}", parameter, kind)
        node.grad_manager("grad", gradient, kind).add_id_match_guard(id(gradient), ("grad",), None)
    check: Callable[[tuple[torch.Tensor, ...]], bool] = tree.check
    return check
