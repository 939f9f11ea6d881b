"""Map tensors inside nests of containers, as arguments and outputs of programs come.

Containers are lists, tuples, mappings, deques, dataclasses and classes of attrs, whatever class of these it is. Other
objects are leaves: they stay as they are, and their contents are not searched.
"""

from __future__ import annotations

import copy
import dataclasses
from array import array
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any

import torch
from torch import nn

PLAIN = (list, tuple, dict)
"""Containers that are copied even if they contain no tensor, so that they are not shared."""


class CannotRebuild(TypeError):
    """Report that a container's class cannot be given other tensors; the message names it."""


def leaves_of(nest: Any) -> Iterator[Any]:
    """Yield everything in `nest` that is not a container, in order; what is there twice comes twice."""
    yield from _leaves(nest, set())


def tensors_of(nest: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in `nest`, in order; a tensor that occurs twice is yielded twice."""
    return (leaf for leaf in leaves_of(nest) if isinstance(leaf, torch.Tensor))


def map_tensors(nest: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `nest` with every tensor replaced by `change(tensor)`; a tensor that occurs twice is replaced once.

    Containers keep their class, but its constructor is not called, because it may require any arguments. Values without
    tensors are not copied.

    Raises:
        CannotRebuild: the tensors of a container cannot be replaced.
    """
    made: dict[int, tuple[Any, Any]] = {}  # by the id of the old one, which is held so that no other gets its id

    def visit(member: Any) -> Any:
        if id(member) in made:
            return made[id(member)][1]
        if isinstance(member, torch.Tensor):
            made[id(member)] = member, change(member)
            return made[id(member)][1]
        places = _places(member)
        if places is None or (type(member) not in PLAIN and next(tensors_of(member), None) is None):
            return member
        if _takes_members_at_once(member):
            changed = {place: visit(each) for place, each in places.items()}
            new = _rebuilding(member, lambda: _constructed(member, changed))
            made[id(member)] = member, new
            return new
        new = _rebuilding(member, lambda: type(member)() if type(member) in PLAIN else copy.copy(member))
        made[id(member)] = member, new  # before it is filled, for members that lead back to it
        changed = {place: visit(each) for place, each in places.items()}
        _rebuilding(member, lambda: _filled(new, changed, member))
        return new

    return visit(nest)


def _leaves(nest: Any, above: set[int]) -> Iterator[Any]:
    places = _places(nest)
    if places is None:
        yield nest
    elif id(nest) not in above:  # a container that contains itself is not entered again
        above.add(id(nest))
        for member in places.values():
            yield from _leaves(member, above)
        above.remove(id(nest))


def _places(nest: Any) -> dict[Any, Any] | None:
    """Return members of a container by key, index or attribute; None if `nest` is not one."""
    if isinstance(nest, (torch.Tensor, nn.Module, type, bytearray, array)):
        return None
    if isinstance(nest, Mapping):
        return dict(nest.items())
    if isinstance(nest, (MutableSequence, tuple)):
        return dict(enumerate(nest))
    return attributes_of(nest)


def attributes_of(nest: Any) -> dict[str, Any] | None:
    """Return fields of a dataclass, or of a class of attrs, and other attributes it has; None if it is neither."""
    if dataclasses.is_dataclass(nest):
        names = [field.name for field in dataclasses.fields(nest)]
    elif hasattr(type(nest), "__attrs_attrs__"):
        names = [field.name for field in type(nest).__attrs_attrs__]
    else:
        return None
    return {name: getattr(nest, name) for name in names if hasattr(nest, name)} | getattr(nest, "__dict__", {})


def _takes_members_at_once(nest: Any) -> bool:
    return isinstance(nest, tuple) or (isinstance(nest, Mapping) and not isinstance(nest, MutableMapping))


def _constructed(old: Any, members: dict[Any, Any]) -> Any:
    """Return a tuple, or a mapping that cannot be written to, of these members."""
    if not isinstance(old, tuple):
        return _checked(type(old)(members), members, old)
    try:
        new = tuple.__new__(type(old), members.values())
    except TypeError:  # results of operators that have several, such as `torch.return_types.max`
        new = type(old)(tuple(members.values()))
    if getattr(old, "__dict__", None):
        vars(new).update(vars(old))
    return _checked(new, members, old)


def _filled(new: Any, members: dict[Any, Any], old: Any) -> Any:
    """Return `new`, a shallow copy of `old`, with these members."""
    if new is old:
        raise TypeError("its copies are itself")
    if isinstance(new, MutableMapping):
        for key, member in members.items():
            new[key] = member
    elif isinstance(new, MutableSequence):
        if type(new) is list:
            new.extend(members.values())
        else:
            for index, member in members.items():
                new[index] = member
    else:
        for name, member in members.items():
            object.__setattr__(new, name, member)  # a frozen one, too
    return _checked(new, members, old)


def _checked(new: Any, members: dict[Any, Any], old: Any) -> Any:
    found = _places(new) or {}
    same = found.keys() == members.keys() and all(found[place] is member for place, member in members.items())
    if type(new) is not type(old) or not same:
        raise TypeError("a copy of it does not keep what it is given")
    return new


def _rebuilding(old: Any, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # whatever its class does when it is copied or written to
        reason = f"{type(error).__name__}: {error}"
        raise CannotRebuild(f"a {type(old).__name__} cannot be given other tensors ({reason})") from error
