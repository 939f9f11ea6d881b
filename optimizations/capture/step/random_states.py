"""Record the states of random generators before a call: a graph draws on the GPU, but draws nothing on the host."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimizations.capture.device import Device
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
    """Record the states of the default generators of PyTorch, Python and NumPy."""

    def __init__(self, device: Device) -> None:
        self._generator = device.default_generator()
        self._before = self._generator.get_state()
        of_host: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
            "random": (random.getstate, random.setstate)
        }
        if (numpy := sys.modules.get("numpy")) is not None:
            of_host["numpy.random"] = numpy.random.get_state, numpy.random.set_state
        if device.has_own_random:  # else the CPU simulates the GPU
            of_host["torch's CPU generator"] = torch.get_rng_state, torch.set_rng_state
        self._on_host = [(name, read, write, read()) for name, (read, write) in of_host.items()]

    def drawn_on_host(self) -> list[str]:
        """Return the program's names of the generators of the host whose state changed."""
        return [name for name, read, _, state in self._on_host if not _equal(read(), state)]

    def drawn_on_gpu(self, observer: Observer) -> bool:
        """Return whether the call drew random numbers on the GPU."""
        return observer.draws or not torch.equal(self._before, self._generator.get_state())

    def refusals(self, observer: Observer) -> list[Refusal]:
        """Return a refusal of a call that drew on the GPU, if a launch would draw different numbers.

        Either the seed changed, which is the first eight bytes of a state, or the generator drew and still has its
        state.
        """
        if observer.queries_random_state:
            return [CHECKPOINT_DRAWS]
        before, now = self._before, self._generator.get_state()
        reseeds = not torch.equal(now[:8], before[:8]) or (observer.draws_by_default and torch.equal(now, before))
        return [RESEEDS] if reseeds else []

    def restore(self) -> None:
        """Restore the recorded states."""
        # Setting even the same state makes the next recurrent layer of cuDNN draw its dropout from another seed.
        if not torch.equal(self._before, self._generator.get_state()):
            self._generator.set_state(self._before)
        for _, read, write, state in self._on_host:
            if not _equal(read(), state):
                write(state)


def drawn_on_the_host(generator: str, code: Sequence[types.CodeType], what: str = "step") -> Refusal:
    """Return the refusal for random numbers from a host generator. `what` names the function, which reaches `code`."""
    return Refusal(
        f"draws random numbers on the host ({generator})",
        f"draw them before the {what} and pass them as arguments, or draw them on the GPU; if they decide nothing, as "
        "those of LayerDrop at rate 0, say so with host_draws='unused'",
        line_with(code, generator),
    )


def _equal(one: Any, other: Any) -> bool:
    """Return whether two states are equal. They may contain arrays, tensors and tuples."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if hasattr(one, "tolist"):
        one, other = one.tolist(), other.tolist()
    return bool(one == other)
