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
"""Tensors up to which a check without a tree of nodes is faster, by about 0.5 us."""

CHECKS_KEPT = 4
"""Comparisons that are kept for the same tensors. They also compare what programs switch on and off between calls:
autocast, and inference mode, which changes dispatch keys."""

CHECKS_MADE = 16
"""Comparisons that are made for the same tensors. Where still others would be needed, Python compares."""


def same_metadata(tensors: Sequence[torch.Tensor]) -> Callable[[tuple[Any, ...]], bool]:
    """Return a function that checks whether a tuple holds tensors with the metadata of these, in the same order."""
    tree = torch_internals.RootGuardManager()
    tree.add_length_check_guard(len(tensors), ("length",), None)
    for index, tensor in enumerate(tensors):
        name = f"tensor {index}"
        tree.tuple_getitem_manager(index, name, tensor, torch_internals.plain_guard_node).add_tensor_match_guard(
            tensor,
            list(tensor.shape),
            list(tensor.stride()),
            name,
            (name,),
            None,
            type(tensor),
            torch_internals.dispatch_keys(tensor),
        )
    check: Callable[[tuple[Any, ...]], bool] = tree.check
    return check


class MetadataChecks(list[Callable[[tuple[Any, ...]], bool]]):
    """Hold comparisons of a tuple of tensors with metadata that were right in earlier calls, the latest first."""

    made = 0

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Compare with the metadata of these as well, which are right."""
        if self.made < CHECKS_MADE:
            self.made += 1
            make = same_if_distinct if 0 < len(tensors) == len(set(map(id, tensors))) <= FEW else same_metadata
            self[:] = [make(tensors), *self[: CHECKS_KEPT - 1]]


def same_if_distinct(tensors: Sequence[torch.Tensor]) -> Callable[[tuple[Any, ...]], bool]:
    """Return the function of `same_metadata` for distinct tensors; it returns False where one stands at two places.

    Its data is a quarter of a tree's: with hundreds of tensors, reading it takes longer than comparing.
    """
    check: Callable[..., bool] = torch_internals.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check
    count = len(tensors)
    return lambda given: len(given) == count and check(*given)


def same_gradients(
    parameters: Sequence[torch.Tensor], expected: Sequence[int | None]
) -> Callable[[tuple[torch.Tensor, ...]], bool]:
    """Return a function that checks whether each parameter of a tuple has the very `.grad` that is expected, by id.

    Where None is expected, any but None is right. Metadata is not compared. The caller keeps what is expected alive.
    """
    tree, plain = torch_internals.RootGuardManager(), torch_internals.plain_guard_node
    for index, (parameter, key) in enumerate(zip(parameters, expected, strict=True)):
        node = tree.tuple_getitem_manager(index, f"parameter {index}", parameter, plain)
        gradient = node.grad_manager("grad", parameter, plain)
        if key is None:
            gradient.add_not_none_guard(("grad",), None)
        else:
            gradient.add_id_match_guard(key, ("grad",), None)
    check: Callable[[tuple[torch.Tensor, ...]], bool] = tree.check
    return check
