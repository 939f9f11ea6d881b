"""Find the tensors that are passed to an operator of PyTorch, and those that it writes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_STATISTICS = ("running_mean", "running_var")
_READING = ("backward", "no_update", "no_training", "functional")
"""In names of operators of batch normalisation that only read its statistics."""


def operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator's call, by the names of its schema."""
    return {**dict(zip(_parameters(func)[0], args, strict=False)), **kwargs}


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the operands that a call of an operator writes: tensors, or lists of them.

    Schemas say it, but for the statistics of batch normalisation in training, which most of its operators write.
    """
    _, declared, updated = _parameters(func)
    given = operands(func, args, kwargs) if declared or updated else {}
    for name in (*declared, *(updated if given.get("training", True) else ())):
        yield given.get(name)


@functools.cache
def _parameters(func: Any) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return an operator's parameters, which of them its schema says are written, and which a training writes."""
    schema = func._schema
    updates = "batch_norm" in schema.name and not any(one in schema.name for one in _READING)
    names = tuple(one.name for one in schema.arguments)
    declared = tuple(one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write)
    return names, declared, tuple(one for one in _STATISTICS if updates and one in names and one not in declared)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, dictionaries and slices."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))
