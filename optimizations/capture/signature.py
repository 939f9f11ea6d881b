"""Make signatures of calls: the structure of the arguments, and shape, strides and dtype of every tensor.

A nest is flattened into its tensors and a structure, a hashable value that includes numbers and strings by value. Two
calls with equal signatures may share a recording.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from optimizations import torch_internals
from optimizations.report.steps import Refusal
from optimizations.torch_internals.geometry import is_lazy_view

NUMPY = (np.number, np.bool_)
"""Scalar types of NumPy."""
PLAIN: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, *NUMPY)
_TENSOR = ("tensor",)
OTHER_RESULT = Refusal(
    "returns something else than a tensor that differs from call to call",
    "return tensors, in tuples, lists, dicts or dataclasses: Python does not run when a graph is launched",
)


def exact(value: Any) -> Hashable:
    """Return a number, string or tuple as a key that distinguishes `1`, `1.0` and `True`, and both zeros."""
    kind = type(value)
    if kind is tuple:
        return tuple(map(exact, value))
    if isinstance(value, NUMPY):
        number: Any = value
        return kind, number.tobytes()
    # A class of the program may not be hashable, or define its own equality.
    as_text = kind not in PLAIN or (kind in (float, complex) and (value == 0 or value != value))
    return kind, repr(value) if as_text else value


class Same:
    """Represent an object that is no tensor, number or container, by identity.

    The object is referenced weakly if possible: otherwise the batches of many calls might be kept alive.
    """

    __slots__ = ("_hash", "get", "kind")

    def __init__(self, value: Any) -> None:
        self.kind = type(value)
        self._hash = id(value)
        try:
            self.get: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self.get = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Same) and (mine := self.get()) is not None and mine is other.get())


_Inside = tuple[int, ...]
"""Ids of the enclosing dataclasses. One that contains itself is treated as an opaque object."""


def members_of(nest: Any, inside: _Inside) -> tuple[tuple[Any, ...] | str | None, Sequence[Any], _Inside] | None:
    """Return the keys or field names of a container, its members, and what they are `inside`; None for a leaf.

    Lists and tuples have no keys. A class that is registered with PyTorch's pytrees has a description instead.
    """
    kind = type(nest)
    if isinstance(nest, (list, tuple)):
        return None, nest, inside
    if kind is dict or isinstance(nest, Mapping):
        return tuple(nest), [nest[key] for key in nest], inside
    if dataclasses.is_dataclass(nest) and not isinstance(nest, (type, torch.Tensor)) and id(nest) not in inside:
        names = tuple([one.name for one in dataclasses.fields(nest) if hasattr(nest, one.name)])
        return names, [getattr(nest, name) for name in names], (*inside, id(nest))
    if kind in torch_internals.pytree.SUPPORTED_NODES:
        members, spec = torch_internals.pytree.tree_flatten(nest)
        return str(spec), members, inside
    return None


def flatten(nest: Any, tensors: list[torch.Tensor], inside: _Inside = ()) -> Hashable:
    """Return the structure of `nest`; its tensors are appended to `tensors`, in order."""
    kind = type(nest)
    if kind is torch.Tensor or isinstance(nest, torch.Tensor):
        tensors.append(nest)
        return _TENSOR
    if kind in PLAIN:
        return exact(nest)
    if (found := members_of(nest, inside)) is None:
        return exact(nest) if isinstance(nest, NUMPY) else Same(nest)
    keys, members, inside = found
    others = () if type(keys) is str else attributes(nest, members)
    return kind, keys, tuple([flatten(member, tensors, inside) for member in members]), others


def attributes(nest: Any, members: Sequence[Any]) -> Hashable:
    """Return the numbers, strings, lists and tuples of these, and tensors that a container of the program's own has.

    Tensors that are also members, as in results of Hugging Face's models, are skipped.
    """
    if not (held := getattr(nest, "__dict__", None)):
        return ()
    known = set(map(id, members))
    found: list[Hashable] = []
    for name, value in held.items():
        if type(value) in PLAIN or (type(value) in (list, tuple) and all(type(member) in PLAIN for member in value)):
            found.append((name, flatten(value, [])))
        elif isinstance(value, torch.Tensor) and id(value) not in known:
            found.append((name, Same(value)))
    return tuple(found)


def is_gone(structure: Any) -> bool:
    """Return whether an object in it was freed, so that no later call can have this structure."""
    if isinstance(structure, Same):
        return structure.get() is None
    return type(structure) is tuple and any(map(is_gone, structure))


def replaced(nest: Any, tensors: Iterator[Any], inside: _Inside = ()) -> Any:
    """Return a copy of `nest` with its tensors, in the order of `flatten`, replaced by those given.

    Raises:
        TypeError: the copy would share memory with the original.
    """
    kind = type(nest)
    if isinstance(nest, torch.Tensor):
        return next(tensors)
    if kind in PLAIN or (found := members_of(nest, inside)) is None:
        return nest
    keys, members, inside = found
    members = [replaced(member, tensors, inside) for member in members]
    if keys is None:
        return members if kind is list else _with_members(nest, members)
    if type(keys) is str:
        return torch_internals.pytree.tree_unflatten(members, torch_internals.pytree.tree_structure(nest))
    now = dict(zip(keys, members, strict=True))
    if kind is dict or isinstance(nest, Mapping):
        return now if kind is dict else _with_values(nest, now)
    changed = copy.copy(nest)
    for name, member in now.items():
        object.__setattr__(changed, name, member)
    return changed


def _with_values(nest: Mapping[Any, Any], values: Mapping[Any, Any]) -> Any:
    """Return a copy of a mapping, with other values."""
    changed: Any = copy.copy(nest)
    for key, value in values.items():
        before = nest[key]
        changed[key] = value
        if value is not before and nest[key] is value:  # the copy shares its values
            changed[key] = before
            raise TypeError(f"a copy of a {type(nest).__qualname__} holds its values in the same memory")
    return changed


def _with_members(nest: Any, members: list[Any]) -> Any:
    """Return a copy of a tuple, or of a list of the program's own class, with other members."""
    kind = type(nest)
    if isinstance(nest, list):
        changed = copy.copy(nest)
        list.__setitem__(changed, slice(None), members)
        return changed
    try:
        made = tuple.__new__(kind, members)
    except TypeError:  # one of C
        return kind(members)
    if held := getattr(nest, "__dict__", None):
        vars(made).update(held)
    return made


def parts(nest: Any, prefix: str, inside: _Inside = ()) -> Iterator[tuple[str, Any, bool]]:
    """Yield an expression, the value, and whether it is a leaf, for all in `nest` in the order of `flatten`."""
    found = members_of(nest, inside)
    yield prefix, nest, found is None
    keys, members, inside = found or (None, (), ())
    expression = "{}[{!r}]" if keys is None or isinstance(nest, Mapping) else "{}.{}"
    for key, member in zip(keys if isinstance(keys, tuple) else range(len(members)), members, strict=True):
        yield from parts(member, expression.format(prefix, key), inside)


def named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """Return the arguments of a call by name. `names`: names of the first positional ones."""
    places = range(len(names), len(args))
    return [*zip([*names, *(f"argument {place}" for place in places)], args, strict=False), *kwargs.items()]


def copies(nest: Any) -> bool:
    """Return whether a copy by `replaced` has the same structure."""
    tensors: list[torch.Tensor] = []
    structure = flatten(nest, tensors)
    try:
        return flatten(replaced(nest, iter([tensor.detach() for tensor in tensors])), []) == structure
    except Exception:  # copying an object of the program may raise anything
        return False


def tensor_key(tensor: torch.Tensor) -> Hashable:
    """Return class, shape, strides, dtype, device, `requires_grad`, and whether it is a lazy conjugate or negative.

    A tensor without strides, such as a compressed or nested one, has its layout instead.
    """
    try:
        lazy = tensor.is_conj(), tensor.is_neg()
        return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, lazy
    except RuntimeError:  # compressed and nested tensors have no strides; they are refused
        return type(tensor), tensor.layout, tensor.is_nested, tensor.dtype, tensor.device, tensor.requires_grad


def alias_pattern(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return for each tensor the index of the first that is the same object."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(tensor), index) for index, tensor in enumerate(tensors)])


def signature(arguments: Any, tensors: list[torch.Tensor]) -> Hashable:
    """Return structure and tensors of a call's arguments; the tensors are appended to `tensors`."""
    structure = flatten(arguments, tensors)
    return structure, tuple([tensor_key(tensor) for tensor in tensors]), alias_pattern(tensors)


def describe(tensors: Sequence[torch.Tensor]) -> str:
    """Return shapes and dtypes as text: "[8, 128] int64, [8] float32"."""
    return ", ".join(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


def refused_tensor(name: str, tensor: torch.Tensor, holds: Callable[[torch.Tensor], bool]) -> Refusal | None:
    """Return why a call with this argument cannot be recorded. `holds`: whether a tensor is on the GPU."""
    if type(tensor) is not torch.Tensor:
        return Refusal(
            f"{name} is a {type(tensor).__qualname__}", "pass plain tensors; reach a parameter by its module"
        )
    if tensor.is_nested:
        return Refusal(f"{name} is a nested tensor", "pass it padded, with its lengths")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return Refusal(f"{name} is not a dense tensor ({tensor.layout})", "pass strided tensors")
    if is_lazy_view(tensor):
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
