"""What one call's arguments look like to a recording: their structure, and shape, strides and dtype of every tensor.

A nest is taken apart into its tensors and a structure, a hashable value in which numbers and strings stand as they are.
Two calls whose signatures are equal may share a recording.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.report.steps import Refusal

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_TENSOR = ("tensor",)


def exact(value: Any) -> Hashable:
    """A number or string, or a tuple of such, as something that equals no other: `1`, `1.0`, `True`, and both zeros."""
    kind = type(value)
    if kind is tuple:
        return tuple(map(exact, value))
    return kind, repr(value) if kind in (float, complex) and (value == 0 or value != value) else value


class Same:
    """An object that is none of tensors, numbers and containers. Equal to itself only.

    It is not kept alive where that can be helped: batches of many calls may be among such.
    """

    __slots__ = ("_get", "_hash", "kind")

    def __init__(self, value: Any) -> None:
        self.kind = type(value)
        self._hash = id(value)
        try:
            self._get: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    @property
    def value(self) -> Any:
        """The object; None once it is gone."""
        return self._get()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Same) and (mine := self._get()) is not None and mine is other._get())


def flatten(nest: Any, tensors: list[torch.Tensor]) -> Hashable:
    """The structure of `nest`; its tensors are appended to `tensors`, in order."""
    kind = type(nest)
    if kind is torch.Tensor or isinstance(nest, torch.Tensor):
        tensors.append(nest)
        return _TENSOR
    if kind in PLAIN:
        return exact(nest)
    if kind is dict or isinstance(nest, Mapping):
        return kind, tuple(nest), tuple([flatten(nest[key], tensors) for key in nest]), attributes(nest)
    if isinstance(nest, (list, tuple)):
        return kind, tuple([flatten(member, tensors) for member in nest]), attributes(nest)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        members = [flatten(getattr(nest, field.name), tensors) for field in dataclasses.fields(nest)]
        return kind, tuple(members), attributes(nest)
    if kind in torch_internals.pytree.SUPPORTED_NODES:
        members, spec = torch_internals.pytree.tree_flatten(nest)
        return kind, str(spec), tuple([flatten(member, tensors) for member in members])
    return Same(nest)


def attributes(nest: Any) -> Hashable:
    """Numbers and strings that a container of the program's own class keeps next to what it contains."""
    held = getattr(nest, "__dict__", None)
    return tuple((name, exact(value)) for name, value in held.items() if type(value) in PLAIN) if held else ()


def without_objects(structure: Any) -> Hashable:
    """A structure, or anything that holds one, with the classes of objects in the place of these."""
    if isinstance(structure, Same):
        return "an object", structure.kind
    return tuple(map(without_objects, structure)) if type(structure) is tuple else structure


def class_of_objects(structure: Any) -> str:
    """The name of the first such class."""
    if isinstance(structure, Same):
        return structure.kind.__qualname__
    return next(filter(None, map(class_of_objects, structure)), "") if type(structure) is tuple else ""


def replaced(nest: Any, tensors: Iterator[Any]) -> Any:
    """A copy of `nest` with its tensors, in the order of `flatten`, replaced by those given."""
    kind = type(nest)
    if isinstance(nest, torch.Tensor):
        return next(tensors)
    if kind in PLAIN:
        return nest
    if kind is dict:
        return {key: replaced(value, tensors) for key, value in nest.items()}
    if isinstance(nest, Mapping):
        changed: Any = copy.copy(nest)
        for key in list(nest):
            changed[key] = replaced(nest[key], tensors)
        return changed
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return kind(*[replaced(member, tensors) for member in nest])
    if isinstance(nest, (list, tuple)):
        return kind([replaced(member, tensors) for member in nest])
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        changed = copy.copy(nest)
        for field in dataclasses.fields(nest):
            object.__setattr__(changed, field.name, replaced(getattr(nest, field.name), tensors))
        return changed
    if kind in torch_internals.pytree.SUPPORTED_NODES:
        members, spec = torch_internals.pytree.tree_flatten(nest)
        return torch_internals.pytree.tree_unflatten([replaced(member, tensors) for member in members], spec)
    return nest


def names(nest: Any, prefix: str) -> Iterator[str]:
    """How a program would write each tensor of `nest`, in the order of `flatten`."""
    if isinstance(nest, torch.Tensor):
        yield prefix
    elif isinstance(nest, Mapping):
        for key in nest:
            yield from names(nest[key], f"{prefix}[{key!r}]")
    elif isinstance(nest, (list, tuple)):
        for index, member in enumerate(nest):
            yield from names(member, f"{prefix}[{index}]")
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        for field in dataclasses.fields(nest):
            yield from names(getattr(nest, field.name), f"{prefix}.{field.name}")
    elif type(nest) in torch_internals.pytree.SUPPORTED_NODES:
        for index, member in enumerate(torch_internals.pytree.tree_flatten(nest)[0]):
            yield from names(member, f"{prefix}.{index}")


def objects(nest: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """What `nest` holds that is none of tensors, numbers and containers, and how a program would write each."""
    if isinstance(nest, torch.Tensor) or type(nest) in PLAIN:
        return
    if isinstance(nest, Mapping):
        members = [(f"{prefix}[{key!r}]", nest[key]) for key in nest]
    elif isinstance(nest, (list, tuple)):
        members = [(f"{prefix}[{index}]", member) for index, member in enumerate(nest)]
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        members = [(f"{prefix}.{field.name}", getattr(nest, field.name)) for field in dataclasses.fields(nest)]
    elif type(nest) in torch_internals.pytree.SUPPORTED_NODES:
        found = torch_internals.pytree.tree_flatten(nest)[0]
        members = [(f"{prefix}.{index}", member) for index, member in enumerate(found)]
    else:
        yield prefix, nest
        return
    for name, member in members:
        yield from objects(member, name)


def tensor_key(tensor: torch.Tensor) -> Hashable:
    """Class, shape, strides, dtype, device, and whether it takes part in differentiation."""
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def alias_pattern(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each tensor the index of the first that is the same object."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(tensor), index) for index, tensor in enumerate(tensors)])


def signature(arguments: Any, tensors: list[torch.Tensor]) -> Hashable:
    """Structure and tensors of a call's arguments; the tensors are appended to `tensors`."""
    structure = flatten(arguments, tensors)
    return structure, tuple([tensor_key(tensor) for tensor in tensors]), alias_pattern(tensors)


def describe(tensors: Sequence[torch.Tensor]) -> str:
    """Shapes and dtypes as text: "[8, 128] int64, [8] float32"."""
    return ", ".join(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


def refused_tensor(name: str, tensor: torch.Tensor, holds: Callable[[torch.Tensor], bool]) -> Refusal | None:
    """Why a call with this tensor among its arguments cannot be recorded. `holds`: whether it lies on the GPU."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return Refusal(f"{name} is a {type(tensor).__qualname__}", "pass plain tensors")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return Refusal(f"{name} is not a dense tensor ({tensor.layout})", "pass strided tensors")
    if tensor.is_conj() or tensor.is_neg():
        return Refusal(f"{name} is a lazy conjugate or negative", "pass it resolved: `resolve_conj()`, `resolve_neg()`")
    if not holds(tensor):
        return Refusal(
            f"{name} is on {tensor.device}",
            "move the batch to the GPU before the call: copies of the host are not repeated by a graph",
        )
    if tensor.requires_grad:
        return Refusal(
            f"{name} requires a gradient", "pass it detached, or capture its producer and the step as one step"
        )
    return None
