"""Detect random numbers that a step draws on the host: a graph would not draw them again."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from optimizations.torch_internals.generator_identity import identity


class HostRandom:
    """Record the states of Python's, NumPy's and PyTorch's CPU generators, and of the program's own.

    Args:
        with_torch: whether PyTorch's CPU generators belong to the host. They do not if the CPU simulates the GPU.
        generators: the program's own generators, by name.
    """

    def __init__(self, *, with_torch: bool, generators: Mapping[str, Any]) -> None:
        found: dict[str, Any] = {**generators, "random": _owner(random.getstate)}
        if (numpy := sys.modules.get("numpy")) is not None:
            found["numpy.random"] = _owner(numpy.random.get_state)
        found["torch's CPU generator"] = torch.default_generator
        self._then = [
            (name, generator, _state(generator))
            for name, generator in found.items()
            if with_torch or not isinstance(generator, torch.Generator)
        ]

    def drawn(self) -> Iterator[str]:
        """Yield the program's names of the generators whose state changed."""
        return (name for name, generator, state in self._then if not _equal(_state(generator), state))

    def restore(self) -> None:
        """Restore the recorded states."""
        for _, generator, state in self._then:
            if not _equal(_state(generator), state):  # setting a state reseeds a generator of the GPU: see `device.py`
                _restore(generator, state)


def _owner(get_state: Any) -> Any:
    """Return the generator of a bound method that a module exports as a function."""
    return get_state.__self__


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    bits = getattr(generator, "bit_generator", None)
    return bits.state if bits is not None else generator.get_state(legacy=False)


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif (bits := getattr(generator, "bit_generator", None)) is not None:
        bits.state = state
    else:
        generator.set_state(state)


def identities(generators: Iterable[Any]) -> frozenset[int]:
    """Return the ids of PyTorch's generators among these."""
    return frozenset(identity(one) for one in generators if isinstance(one, torch.Generator))


def _equal(one: Any, other: Any) -> bool:
    """Return whether two states are equal. They may contain arrays, tensors, dicts and tuples."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if hasattr(one, "tolist"):
        one, other = one.tolist(), other.tolist()
    return bool(one == other)
