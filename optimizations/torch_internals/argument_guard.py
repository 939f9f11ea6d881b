"""Whether tensors look as others did, and values stand where they stood, asked of PyTorch's guards in one call each.

See `identity_guard` for how such a tree of guards works. Nothing here is marked to be skipped: each call looks at all.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals


def same_looks(tensors: Sequence[torch.Tensor]) -> Callable[[tuple[Any, ...]], bool]:
    """A function that tells whether a tuple holds tensors of the same types, shapes, strides, dtypes and devices.

    And in the same order, with the same `requires_grad` and dispatch keys, which autocast and inference mode change.
    """
    tree = torch_internals.RootGuardManager()
    kind = torch_internals.GuardManagerType.GUARD_MANAGER
    tree.add_length_check_guard(len(tensors), ("length",), None)
    for index, tensor in enumerate(tensors):
        name = f"tensor {index}"
        tree.tuple_getitem_manager(index, name, tensor, kind).add_tensor_match_guard(
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


_DICTS = (dict, OrderedDict, defaultdict)


def same_gradients(
    parameters: Sequence[torch.Tensor], expected: Sequence[torch.Tensor | None]
) -> Callable[[tuple[torch.Tensor, ...]], bool]:
    """A function that tells whether each of the parameters, given as a tuple, has the very `.grad` that is expected.

    Its caller keeps what is expected alive.
    """
    tree = torch_internals.RootGuardManager()
    kind = torch_internals.GuardManagerType.GUARD_MANAGER
    for index, (parameter, gradient) in enumerate(zip(parameters, expected, strict=True)):
        name = f"parameter {index}"
        node = tree.tuple_getitem_manager(index, name, parameter, kind)
        node.grad_manager(f"{name}.grad", gradient, kind).add_id_match_guard(id(gradient), (name,), None)
    check: Callable[[tuple[torch.Tensor, ...]], bool] = tree.check
    return check


@dataclass(frozen=True, slots=True)
class Held:
    """What stands in a dict under keys, in a list, or in a closure cell (under any key).

    `size` is how many there are, None where that does not matter.
    """

    holder: Any
    entries: tuple[tuple[Any, Any], ...]
    size: int | None


def can_be_asked(holder: Any, entries: Sequence[tuple[Any, Any]]) -> bool:
    """Whether C++ reads the holder as Python does."""
    if type(holder) in _DICTS:  # C++ compares the keys, which tensors do element by element
        return all(type(key) is str for key, _ in entries)
    empty = any(value is holder for _, value in entries)  # what stands for the content of an empty cell
    return type(holder) in (list, types.CellType) and not empty


def same_values(held: Sequence[Held]) -> Callable[[], bool]:
    """A function that tells whether the very same objects stand there. It keeps them alive."""
    tree = torch_internals.RootGuardManager()
    kind = torch_internals.GuardManagerType.GUARD_MANAGER
    kept = tuple(held)
    root = tuple(one.holder for one in kept)
    for index, one in enumerate(kept):
        name = f"held {index}"
        node = tree.tuple_getitem_manager(index, name, one.holder, kind)
        is_dict = type(one.holder) in _DICTS
        if one.size is not None:
            (node.add_dict_length_check_guard if is_dict else node.add_length_check_guard)(one.size, (name,), None)
        for key, value in one.entries:
            if is_dict:
                leaf = node.dict_getitem_manager(key, name, value, kind)
            elif type(one.holder) is list:
                leaf = node.list_getitem_manager(key, name, value, kind)
            else:
                leaf = node.getattr_manager("cell_contents", name, value, kind)
            leaf.add_id_match_guard(id(value), (name,), None)
    check = tree.check

    def same() -> bool:
        return bool(check(root)) if kept else True

    return same
