"""Notice random numbers of the host that a step draws: a graph would not draw them again.

Note [Draws that decide nothing]. Libraries draw numbers that nothing depends on, such as those of LayerDrop at rate 0.
The caller may say so (`host_draws="unused"`). That cannot be proved, but it can be contradicted: calls that drew
different numbers must have run the same operators with the same arguments. So one difference between two such calls is
enough for a refusal, and calls that began with a generator in the same state, and so drew the same, tell nothing.
Tensors that the host made are compared by their values where an operator of the GPU reads them (`observer`), and where
they are results. Those that the GPU computes are told by the operator that gave them: a call may draw which of two it
goes on with.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optimizations.report.steps import Refusal
from optimizations.torch_internals.generator_identity import identity


@dataclass(frozen=True, slots=True)
class HostDraws:
    """Record what a call drew on the host. Note [Draws that decide nothing].

    Attributes:
        states: of the generators it drew from, by name, as they were before.
        results: values of tensors on the host that it made, and returned or kept in attributes.
        chosen: which of the tensors that it computed, or was given, it returned or kept.
    """

    states: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()

    def repeats(self, before: HostDraws) -> bool:
        """Return whether a generator began this call as it began the one before."""
        return any(name in before.states and _equal(state, before.states[name]) for name, state in self.states.items())

    def other_results(self, before: HostDraws) -> Refusal | None:
        """Return the refusal where it has other results than the call before."""
        if self.results != before.results:
            return RETURNS_DRAWS
        return CHOOSES if self.chosen != before.chosen else None


SAME_DRAWS = Refusal(
    "draws the same random numbers on the host in each call, because a generator is seeded before it, so that it "
    "cannot be seen whether they decide something",
    "seed once, before the first call",
)
RETURNS_DRAWS = Refusal(
    "returns, or keeps in an attribute, a tensor in CPU memory that differs from call to call",
    "draw it after the step",
)
CHOOSES = Refusal(
    "returns, or keeps in an attribute, another of the tensors that it computes than the call before",
    "choose before the step and pass the choice as an argument, or on the GPU with torch.where",
)


def decides(difference: Refusal, names: Iterable[str]) -> Refusal:
    """Return the refusal where calls differ, though what they draw on the host is said to decide nothing."""
    return replace(
        difference,
        reason=f"draws random numbers on the host ({', '.join(names)}) that seem to decide something, other than "
        f"host_draws='unused' says: it {difference.reason}",
        advice="draw them before the step and pass them as arguments, or draw them on the GPU",
    )


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

    def draws(self, results: tuple[str, ...] = (), chosen: tuple[str, ...] = ()) -> HostDraws:
        """Return what was drawn since. `results` and `chosen` are those of `HostDraws`."""
        own = {name: state for name, _, state in self._own}
        others = {"random": self._python, "numpy.random": self._numpy, "torch's CPU generator": self._torch}
        return HostDraws({name: own[name] if name in own else others[name] for name in self.drawn()}, results, chosen)

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
