"""Record the states of random generators before a call: a graph draws on the GPU, but draws nothing on the host."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

from optimizations.capture.device import Device
from optimizations.capture.step.host_state import HostState
from optimizations.capture.step.observer import Observer
from optimizations.capture.step.source_lines import line_with
from optimizations.report.steps import Refusal

CHECKPOINT_DRAWS = Refusal(
    "keeps the GPU's random state to draw the same numbers again, as torch.utils.checkpoint does for recomputation",
    "use torch.compile for the checkpointed part, or pass preserve_rng_state=False if it draws no random numbers",
)
RESEEDS = Refusal(
    "seeds a generator of random numbers, or sets its state",
    "do so before the step: a graph would not repeat it, and would continue its sequence of random numbers",
)


class RandomStates:
    """Record the states of PyTorch's, Python's and NumPy's generators, and of the last two's in `states`."""

    def __init__(self, device: Device, *states: HostState) -> None:
        self._device, self._before = device, device.random_states()
        own = {name: one for state in states for name, one in state.generators.items()}
        self._refused = [(one, one.get_state()) for one in own.values() if isinstance(one, torch.Generator)]
        # The functions of these modules are bound methods of their generators.
        on_host = {name: one for name, one in own.items() if not isinstance(one, torch.Generator)}
        on_host["random"] = random.getstate.__self__  # type: ignore[attr-defined]
        if (numpy := sys.modules.get("numpy")) is not None:
            on_host["numpy.random"] = numpy.random.get_state.__self__
        if device.has_own_random:  # else the CPU simulates the GPU
            on_host["torch's CPU generator"] = torch.default_generator
        self._on_host = [(name, one, _state(one)) for name, one in on_host.items()]
        self._on_gpu = device.default_generator().get_state()

    def drawn_on_host(self) -> list[str]:
        """Return the program's names of the generators of the host whose state changed."""
        return [name for name, generator, state in self._on_host if not _equal(_state(generator), state)]

    def drawn_on_gpu(self, observer: Observer) -> bool:
        """Return whether the call drew random numbers on the GPU."""
        return observer.draws or not all(map(torch.equal, self._before, self._device.random_states()))

    def refusals(self, observer: Observer) -> list[Refusal]:
        """Return a refusal of a call that drew on the GPU, if a launch would draw different numbers.

        Either the seed changed, which is the first eight bytes of a state, or the generator drew and still has its
        state.
        """
        if observer.queries_random_state:
            return [CHECKPOINT_DRAWS]
        before, now = self._on_gpu, self._device.default_generator().get_state()
        reseeds = not torch.equal(now[:8], before[:8]) or (observer.draws_by_default and torch.equal(now, before))
        return [RESEEDS] if reseeds else []

    def restore(self) -> None:
        """Restore the recorded states."""
        self._device.restore_random_states(self._before)
        for _, generator, state in [*self._on_host, *(("", *one) for one in self._refused)]:
            if not _equal(_state(generator), state):
                _restore(generator, state)


def drawn_on_the_host(generator: str, code: Sequence[types.CodeType], what: str = "step") -> Refusal:
    """Return the refusal for random numbers from a host generator. `what` names the function, which reaches `code`."""
    return Refusal(
        f"draws random numbers on the host ({generator})",
        f"draw them before the {what} and pass them as arguments, or draw them on the GPU; if they decide nothing, as "
        "those of LayerDrop at rate 0, say so with host_draws='unused'",
        line_with(code, generator),
    )


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


def _equal(one: Any, other: Any) -> bool:
    """Return whether two states are equal. They may contain arrays, tensors, dicts and tuples."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if hasattr(one, "tolist"):
        one, other = one.tolist(), other.tolist()
    return bool(one == other)
