"""Map tensors inside nests of containers, as arguments and outputs of programs come.

Containers are lists, tuples, mappings, deques, dataclasses and classes of attrs, whatever class of these it is. Other
objects are leaves: they stay as they are, and their contents are not searched.
"""

from __future__ import annotations

import copy
import dataclasses
from array import array
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from typing import Any

import torch
from torch import nn


class CannotRebuild(TypeError):
    """Report that a container cannot be given other tensors."""


def leaves_of(nest: Any) -> Iterator[Any]:
    """Yield everything in `nest` that is not a container, in order; what is there twice comes twice."""
    yield from _leaves(nest, set())


def tensors_of(nest: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in `nest`, in order; a tensor that occurs twice is yielded twice."""
    return (leaf for leaf in leaves_of(nest) if isinstance(leaf, torch.Tensor))


def map_tensors(nest: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `nest` with every tensor replaced by `change(tensor)`; a tensor that occurs twice is replaced once.

    It is a deep copy in which the other leaves are the same objects. Containers keep their class.

    Raises:
        CannotRebuild: a container cannot be copied, or its copy does not have the other tensors.
    """
    leaves = list(leaves_of(nest))  # held, so that no other object gets the id of one
    made = {id(leaf): leaf for leaf in leaves}
    made |= {key: change(leaf) for key, leaf in made.items() if isinstance(leaf, torch.Tensor)}
    try:
        new = copy.deepcopy(nest, dict(made))
    except Exception as error:  # whatever a class does when it is copied
        raise CannotRebuild(f"a container cannot be copied ({type(error).__name__}: {error})") from error
    if list(map(id, leaves_of(new))) != [id(made[id(leaf)]) for leaf in leaves]:
        raise CannotRebuild("a container cannot be given other tensors: its copy does not have them")
    return new


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
