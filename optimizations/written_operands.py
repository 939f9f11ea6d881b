"""Find the tensors that are passed to an operator of PyTorch, and those that it writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_STATISTICS = ("running_mean", "running_var")
_READING = ("backward", "no_update", "no_training", "functional")
"""In names of operators of batch normalisation that only read its statistics."""


def operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator's call, by the names of its schema."""
    names = [parameter.name for parameter in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the operands that a call of an operator writes: tensors, or lists of them.

    Schemas say it, but for the statistics of batch normalisation in training, which most of its operators write.
    """
    given, name = operands(func, args, kwargs), func._schema.name
    updates = "batch_norm" in name and not any(one in name for one in _READING) and given.get("training", True)
    for parameter in func._schema.arguments:
        declared = parameter.alias_info is not None and parameter.alias_info.is_write
        if declared or (updates and parameter.name in _STATISTICS):
            yield given.get(parameter.name)


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
