"""Which inputs of a generated backward are the random state of memory-efficient attention.

Note [Seeds of attention]. Two operators read their random state where the run needs it. Outside a capture they read it
on the host, inside a capture they pass its address on the GPU to a kernel. Their forwards return it accordingly. A
forward that replays a graph therefore leaves seeds on the GPU that a backward without a graph cannot read: the process
ends. The numbers are the same on both sides, because a captured backward adds nothing to the stored offset. Other
attention operators (flash, cuDNN) have an argument of the same name and keep it on the GPU in every case.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping

import torch

READERS = ("_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward")
"""The operators (of `aten`) that read seeds on the host outside a capture."""

SEEDS = ("philox_seed", "philox_offset")
"""Their arguments that hold random state."""


def names_a_reader(source: str) -> bool:
    """Return whether generated source may call one of `READERS`."""
    return any(name in source for name in READERS)


def find_seeds(calls: Iterable[tuple[str, ast.Call]], inputs: Mapping[str, int]) -> tuple[int, ...]:
    """Return the positions of inputs that are passed to `READERS` as seeds.

    Args:
        calls: the calls of a generated function, each with its dotted name.
        inputs: positions of inputs by name.
    """
    found: set[int] = set()
    for name, call in calls:
        parts = name.split(".")
        reader = next((one for one in READERS if one in parts), None)
        if reader is None:
            continue
        given = dict(enumerate(call.args))
        named = {one.arg: one.value for one in call.keywords}
        for position, seed in _positions(reader):
            value = given.get(position, named.get(seed))
            if isinstance(value, ast.Call) and value.args:  # reinterpret_tensor(philox_seed, ...)
                value = value.args[0]
            if isinstance(value, ast.Name) and value.id in inputs:
                found.add(inputs[value.id])
    return tuple(sorted(found))


@functools.cache
def _positions(reader: str) -> tuple[tuple[int, str], ...]:
    """Return position and name of the seeds among an operator's arguments, from its schema."""
    arguments = getattr(torch.ops.aten, reader).default._schema.arguments
    return tuple((position, one.name) for position, one in enumerate(arguments) if one.name in SEEDS)
