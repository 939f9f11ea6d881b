"""Objects that count as containers of what their attributes hold: those of dataclasses, and of classes of batches.

Note [Batches that are objects]. Of an object in a call's arguments it is known only that it is the same as before. A
batch that is another in each call, such as one of a class with a few tensors, or a `SimpleNamespace`, would be served
by no graph. So once a step was given several of one class, and did not keep them all, that class counts as a dataclass
does, if it is one whose objects are no more than what stands in them: no code of its own runs when an attribute is
read, written or copied, and they hold tensors, numbers and containers of such. Objects that stay, such as a trainer or
agents by turns, keep standing for themselves: a step may bind their attributes to other tensors, those of a container
that it is given it may not.
"""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch

_CLASSES: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes of batches that were found, in all steps of the process."""
_RUN_CODE = (
    *("__getattr__", "__getattribute__", "__setattr__", "__delattr__", "__slots__", "__new__", "__del__", "__copy__"),
    *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__", "__dict__"),
)
"""By these, a class may be more than its attributes, or its copies other than it is."""
_GIVEN_BY_PYTHON = (object, types.SimpleNamespace)
_DEEPEST = 8


def is_dataclass(nest: Any) -> bool:
    """Whether it is an object of a dataclass."""
    return dataclasses.is_dataclass(nest) and not isinstance(nest, type)


def is_container(nest: Any) -> bool:
    """Whether an object counts as a container: it is of a dataclass, or of a class that counts as one."""
    return is_dataclass(nest) or type(nest) in _CLASSES


def fields(nest: Any) -> list[tuple[str, Any]]:
    """By name, what stands in such a container: the fields of a dataclass that hold something, or all attributes."""
    if not is_dataclass(nest):
        return sorted(vars(nest).items())
    named = [field.name for field in dataclasses.fields(nest)]
    return [(name, getattr(nest, name)) for name in named if hasattr(nest, name)]


def count_as_containers(batches: Iterable[Any], plain: tuple[type, ...]) -> bool:
    """Let the classes of these objects count as dataclasses do, if all can. Note [Batches that are objects].

    Args:
        plain: classes of numbers, strings and the like.
    """
    batches, looked_at = list(batches), _Look(plain)
    if not batches or not all(_is_plain(type(one)) and looked_at.is_data(one) for one in batches):
        return False
    _CLASSES.update(looked_at.classes)
    return True


class _Look:
    """Looks whether objects hold tensors and nothing but data.

    Attributes:
        classes: those of the objects, and of objects in them.
    """

    def __init__(self, plain: tuple[type, ...]) -> None:
        self._plain = plain
        self.classes: set[type] = set()

    def is_data(self, value: Any, deep: int = 0) -> bool:
        """Whether it is a tensor that needs no gradient, a number or string, or a container of such."""
        kind = type(value)
        if kind is torch.Tensor:
            return not value.requires_grad
        if kind in self._plain:
            return True
        if deep == _DEEPEST:
            return False
        members: Iterable[Any]
        if kind in (list, tuple):
            members = value
        elif kind is dict and all(type(key) in self._plain for key in value):
            members = value.values()
        elif _is_plain(kind) and all(map(str.isidentifier, vars(value))):
            self.classes.add(kind)
            members = vars(value).values()
        else:
            return False
        return all(self.is_data(one, deep + 1) for one in members)


def _is_plain(kind: type) -> bool:
    for base in kind.__mro__:
        if base in _GIVEN_BY_PYTHON:
            continue
        if not _is_of_python(base) or any(_has_own(base, name) for name in _RUN_CODE):
            return False
    return kind is not object and kind.__dictoffset__ != 0


def _is_of_python(kind: type) -> bool:
    """Whether a class was made by a `class` statement: a class of C may hold more than attributes."""
    return bool(kind.__flags__ & _HEAP_TYPE)


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def _has_own(base: type, name: str) -> bool:
    if name not in vars(base):
        return False
    if name == "__dict__":  # the ordinary way to an object's attributes
        return not isinstance(vars(base)[name], types.GetSetDescriptorType)
    return name != "__slots__" or vars(base)[name] != ()  # `typing.Generic` and `abc.ABC` have none
