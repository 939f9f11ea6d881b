"""Make signatures of calls: the structure of the arguments, and shape, strides and dtype of every tensor.

A nest is flattened into its tensors and a structure, a hashable value that includes numbers and strings by value. Two
calls with equal signatures may share a recording.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.report.steps import Refusal
from optimizations.torch_internals.geometry import is_lazy_view

NUMPY: tuple[type, ...] = ()
"""Scalar types of NumPy, which PyTorch imports if it is installed."""
if (_numpy := sys.modules.get("numpy")) is not None:
    NUMPY = (_numpy.number, _numpy.bool_)
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
        """Return the object; None after it was freed."""
        return self._get()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Same) and (mine := self._get()) is not None and mine is other._get())


def flatten(nest: Any, tensors: list[torch.Tensor], inside: tuple[int, ...] = ()) -> Hashable:
    """Return the structure of `nest`; its tensors are appended to `tensors`, in order.

    `inside`: ids of the enclosing dataclasses. One that contains itself is treated as an opaque object.
    """
    kind = type(nest)
    if kind is torch.Tensor or isinstance(nest, torch.Tensor):
        tensors.append(nest)
        return _TENSOR
    if kind in PLAIN:
        return exact(nest)
    if kind is dict or isinstance(nest, Mapping):
        return kind, tuple(nest), tuple([flatten(nest[key], tensors, inside) for key in nest]), attributes(nest)
    if isinstance(nest, (list, tuple)):
        return kind, tuple([flatten(member, tensors, inside) for member in nest]), attributes(nest)
    if is_dataclass(nest) and id(nest) not in inside:
        inside = (*inside, id(nest))
        members = [(name, flatten(member, tensors, inside)) for name, member in fields(nest)]
        return kind, tuple(members), attributes(nest)
    if kind in torch_internals.pytree.SUPPORTED_NODES:
        members, spec = torch_internals.pytree.tree_flatten(nest)
        return kind, str(spec), tuple([flatten(member, tensors, inside) for member in members])
    return exact(nest) if isinstance(nest, NUMPY) else Same(nest)


def is_dataclass(nest: Any) -> bool:
    """Return whether it is an object of a dataclass."""
    return dataclasses.is_dataclass(nest) and not isinstance(nest, type)


def fields(nest: Any) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass that have a value, by name."""
    named = [field.name for field in dataclasses.fields(nest)]
    return [(name, getattr(nest, name)) for name in named if hasattr(nest, name)]


def attributes(nest: Any) -> Hashable:
    """Return the numbers, strings, lists and tuples of these, and tensors that a container of the program's own has.

    Tensors that are also members, as in results of Hugging Face's models, are skipped.
    """
    if not (held := getattr(nest, "__dict__", None)):
        return ()
    if isinstance(nest, Mapping):
        nest = nest.values()
    members = set(map(id, [value for _, value in fields(nest)] if is_dataclass(nest) else nest))
    found: list[Hashable] = []
    for name, value in held.items():
        if type(value) in PLAIN:
            found.append((name, exact(value)))
        elif type(value) in (list, tuple) and all(type(member) in PLAIN for member in value):
            found.append((name, type(value), exact(tuple(value))))
        elif isinstance(value, torch.Tensor) and id(value) not in members:
            found.append((name, Same(value)))
    return tuple(found)


def without_objects(structure: Any) -> Hashable:
    """Return a structure, or a tuple that contains one, with objects replaced by their classes."""
    if isinstance(structure, Same):
        return "an object", structure.kind
    return tuple(map(without_objects, structure)) if type(structure) is tuple else structure


def is_gone(structure: Any) -> bool:
    """Return whether an object in it was freed, so that no later call can have this structure."""
    if isinstance(structure, Same):
        return structure.value is None
    return type(structure) is tuple and any(map(is_gone, structure))


def replaced(nest: Any, tensors: Iterator[Any], inside: tuple[int, ...] = ()) -> Any:
    """Return a copy of `nest` with its tensors, in the order of `flatten`, replaced by those given.

    Raises:
        TypeError: the copy would share memory with the original.
    """
    kind = type(nest)
    if isinstance(nest, torch.Tensor):
        return next(tensors)
    if kind in PLAIN:
        return nest
    if kind is dict:
        return {key: replaced(value, tensors, inside) for key, value in nest.items()}
    if isinstance(nest, Mapping):
        return _with_values(nest, {key: replaced(nest[key], tensors, inside) for key in nest})
    if isinstance(nest, (list, tuple)):
        members = [replaced(member, tensors, inside) for member in nest]
        return members if kind is list else _with_members(nest, members)
    if is_dataclass(nest) and id(nest) not in inside:
        changed = copy.copy(nest)
        for name, member in fields(nest):
            object.__setattr__(changed, name, replaced(member, tensors, (*inside, id(nest))))
        return changed
    if kind in torch_internals.pytree.SUPPORTED_NODES:
        members, spec = torch_internals.pytree.tree_flatten(nest)
        return torch_internals.pytree.tree_unflatten([replaced(one, tensors, inside) for one in members], spec)
    return nest


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


def parts(nest: Any, prefix: str, inside: tuple[int, ...] = ()) -> Iterator[tuple[str, Any, bool]]:
    """Yield an expression, the value, and whether it is a leaf, for all in `nest` in the order of `flatten`."""
    if type(nest) in PLAIN or isinstance(nest, torch.Tensor):
        members = None
    elif isinstance(nest, Mapping):
        members = [(f"{prefix}[{key!r}]", nest[key]) for key in nest]
    elif isinstance(nest, (list, tuple)):
        members = [(f"{prefix}[{index}]", member) for index, member in enumerate(nest)]
    elif is_dataclass(nest) and id(nest) not in inside:
        members = [(f"{prefix}.{name}", member) for name, member in fields(nest)]
        inside = (*inside, id(nest))
    elif type(nest) in torch_internals.pytree.SUPPORTED_NODES:
        found = torch_internals.pytree.tree_flatten(nest)[0]
        members = [(f"{prefix}.{index}", member) for index, member in enumerate(found)]
    else:
        members = None
    yield prefix, nest, members is None
    for name, member in members or ():
        yield from parts(member, name, inside)


def named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """Return the arguments of a call by name. `names`: names of the first positional ones."""
    places = range(len(names), len(args))
    return [*zip([*names, *(f"argument {place}" for place in places)], args, strict=False), *kwargs.items()]


def copies(nest: Any) -> bool:
    """Return whether a copy by `replaced` has the same structure."""
    tensors: list[torch.Tensor] = []
    structure = flatten(nest, tensors)
    others: list[torch.Tensor] = []
    try:
        again = flatten(replaced(nest, iter([tensor.detach() for tensor in tensors])), others)
    except Exception:  # copying an object of the program may raise anything
        return False
    return len(others) == len(tensors) and again == structure


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
