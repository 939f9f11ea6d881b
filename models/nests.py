"""Tensors inside nests of lists, tuples and mappings, as arguments and outputs of programs come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def tensors_of(nest: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `nest`, in order; one that stands twice comes twice."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, Mapping):
        for member in nest.values():
            yield from tensors_of(member)
    elif isinstance(nest, (list, tuple)):
        for member in nest:
            yield from tensors_of(member)


def map_tensors(nest: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`nest` with every tensor replaced by `change(tensor)`; one that stands twice stays one object.

    Mappings become plain dicts; other containers and what they hold other than tensors stay as they are.
    """
    changed: dict[int, torch.Tensor] = {}

    def visit(member: Any) -> Any:
        if isinstance(member, torch.Tensor):
            if id(member) not in changed:
                changed[id(member)] = change(member)
            return changed[id(member)]
        if isinstance(member, Mapping):
            return {key: visit(value) for key, value in member.items()}
        if isinstance(member, tuple) and hasattr(member, "_fields"):
            return type(member)(*map(visit, member))
        if isinstance(member, (list, tuple)):
            return type(member)(map(visit, member))
        return member

    return visit(nest)
