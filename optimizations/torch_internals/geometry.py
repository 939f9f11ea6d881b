"""Check in C++ whether tensors have the metadata that others had, and whether those that persist have their geometry.

Metadata are type, shape, strides, dtype, device, `requires_grad` and dispatch keys, which autocast and inference mode
change. The checks are those of Dynamo's guards. Geometry is shape, strides and dtype alone.

Note [Geometry at an unchanged address]. After `tensor.t_()`, `resize_` or `tensor.data = tensor.data.t()` a tensor is
the same object at the same address with the same bytes. Dynamo's guards may skip it: if a module's dictionary was not
written, they assume that its tensors are unchanged. Generated code checks each of its inputs, and raises. A replayed
graph does not, and would read the old layout. So wherever an address is compared with an earlier call's, the geometry
is compared as well.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimizations import torch_internals

Check = Callable[[Sequence[Any]], bool]
Geometry = tuple[torch.dtype, torch.Size, tuple[int, ...]]

CHECKS_KEPT = 4
"""Comparisons that are kept for the same tensors. They also compare what programs switch on and off between calls:
autocast, and inference mode, which changes dispatch keys."""


def same_metadata(tensors: Sequence[torch.Tensor]) -> Check:
    """Return a function that checks whether tensors have the metadata of these, in the same order.

    It returns False where one tensor stands at two places.
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


def picker(places: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that gives the values at these places, in one call."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple([values[place] for place in places])


def is_lazy_view(tensor: torch.Tensor) -> bool:
    """Return whether a flag says that a tensor is the conjugate or negative of its memory's values.

    Generated code, and other code that only uses a tensor's address and geometry, ignores that flag.
    """
    return tensor.is_conj() or tensor.is_neg()


def _geometry_of(value: Any) -> Geometry | None:
    """Return dtype, shape, and the strides of dimensions of more than one element; None for what has no strides."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
        return None
    steps = tuple(step for extent, step in zip(value.shape, value.stride(), strict=True) if extent > 1)
    return value.dtype, value.shape, steps


class FixedGeometry:
    """Compare some inputs of each call with the geometry that they had in an earlier call.

    It keeps no tensor. Inputs without strides are left out.

    Args:
        inputs: the inputs of the earlier call.
        indices: which of them are compared.
    """

    __slots__ = ("_checks", "_given", "_pick", "_wanted", "indices")

    def __init__(self, inputs: Sequence[Any], indices: Sequence[int]) -> None:
        self._given = tuple(indices)
        found = {index: geometry for index in indices if (geometry := _geometry_of(inputs[index])) is not None}
        self.indices, self._wanted = tuple(found), list(found.values())
        self._pick = picker(self.indices)
        self._checks: list[Check] = []  # the latest first

    def is_of(self, inputs: Sequence[Any], indices: Sequence[int]) -> bool:
        """Return whether it may serve for other calls in which these indices are compared, as of these inputs."""
        return self._given == tuple(indices) and self.holds(inputs)

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Return whether these inputs have the geometry that they had."""
        tensors = self._pick(inputs)
        for check in self._checks:  # the first mostly holds
            if check(tensors):
                return True
        return not tensors or self._found_in_python(tensors)

    def changes(self, inputs: Sequence[Any]) -> list[tuple[int, Geometry, Any]]:
        """Return index, geometry before and geometry now (None without strides) of each input that has another one."""
        pairs = zip(self.indices, self._wanted, self._pick(inputs), strict=True)
        return [(index, before, now) for index, before, one in pairs if (now := _geometry_of(one)) != before]

    def require_dtypes(self, inputs: Sequence[Any]) -> None:
        """Check dtypes: generated code checks shapes and strides only, and would read bytes as the earlier dtype.

        Raises:
            RuntimeError: an input has another dtype.
        """
        for index, before, now in self.changes(inputs):
            if now is not None and now[0] is not before[0]:
                raise RuntimeError(
                    f"Input {index} of a compiled graph, which stays between calls, has dtype {now[0]} now; the graph "
                    f"was compiled for {before[0]}. Assign another tensor to the module instead of changing the one "
                    "it has: then it is compiled anew."
                )

    def _found_in_python(self, tensors: tuple[Any, ...]) -> bool:
        if any(_geometry_of(one) != wanted for one, wanted in zip(tensors, self._wanted, strict=True)):
            return False
        if len(set(map(id, tensors))) == len(tensors):
            self._checks = [same_metadata(tensors), *self._checks[: CHECKS_KEPT - 1]]
        return True
