"""Notice random numbers of the host that a step draws: a graph would not draw them again."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from optimizations.torch_internals.generator_identity import identity


class HostRandom:
    """Keep the states of Python's, NumPy's and PyTorch's CPU generators when this was made.

    `with_torch`: PyTorch's counts as the host's (it does not where the CPU stands for the GPU). `generators`: those of
    the program's own, by name.
    """

    def __init__(self, *, with_torch: bool, generators: Mapping[str, Any] | None = None) -> None:
        self._own = [
            (name, generator, _state(generator))
            for name, generator in (generators or {}).items()
            if with_torch or not isinstance(generator, torch.Generator)
        ]
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = numpy.random.get_state() if numpy is not None else None
        self._torch = torch.random.get_rng_state() if with_torch else None

    def drawn(self) -> Iterator[str]:
        """Yield the generators whose state is another now, as a program names them."""
        yield from (name for name, generator, state in self._own if not _equal(_state(generator), state))
        if random.getstate() != self._python:
            yield "random"
        if self._numpy is not None:
            now: Any = sys.modules["numpy"].random.get_state()
            if now[2:] != self._numpy[2:] or (now[1] != self._numpy[1]).any():
                yield "numpy.random"
        if self._torch is not None and not torch.equal(torch.random.get_rng_state(), self._torch):
            yield "torch's CPU generator"

    def restore(self) -> None:
        """Put the states back."""
        for _, generator, state in self._own:
            if not _equal(_state(generator), state):  # one of a GPU takes any state for a new seed: see `device.py`
                _restore(generator, state)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._torch is not None:
            torch.random.set_rng_state(self._torch)


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
    """Return the identities of PyTorch's generators among these."""
    return frozenset(identity(one) for one in generators if isinstance(one, torch.Generator))


def _equal(one: Any, other: Any) -> bool:
    """Return whether two states are equal. They may hold arrays and tensors, dicts of them, and tuples."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if hasattr(one, "tolist"):
        one, other = one.tolist(), other.tolist()
    return bool(one == other)
