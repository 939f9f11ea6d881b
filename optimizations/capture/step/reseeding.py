"""Tell whether a step puts a generator of the GPU's random numbers into another state than its draws do.

Each launch of a graph continues the random numbers where the last launch ended. A step that seeds a generator, or sets
its state, draws the same numbers in each call, and a capture does not show that it did so. So the generator's state is
looked at around each draw of the calls that are observed. Code may draw without telling (compiled code, operators of
libraries), so a generator of the GPU may have gone on in between; on the CPU, where none is captured but in tests, it
may not.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from optimizations.capture.step.source_lines import current_line
from optimizations.report.steps import Refusal
from optimizations.torch_internals.generator_identity import identity

_SEED_BYTES = 8
"""The state of a generator of the GPU begins with its seed, and its place in the sequence follows."""


class Reseeding:
    """Check the states of generators. Made before a call. `generators` are known from calls before.

    `found`: whether one was put into another state, `line` where that was noticed.
    """

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._states = {identity(generator): (generator, _state(generator)) for generator in generators}
        self.found = False
        self.line: str | None = None

    def look(self, generator: torch.Generator) -> None:
        """Check a generator before a draw."""
        known = self._states.get(identity(generator))
        if known is not None and not self.found and not _goes_on(generator, known[1], _state(generator)):
            self.found, self.line = True, current_line()

    def drew(self, generator: torch.Generator) -> None:
        """Note a generator's state after a draw."""
        self._states[identity(generator)] = generator, _state(generator)

    def refusals(self) -> list[Refusal]:
        """Check all generators when the call is over; return the refusals."""
        for generator, _ in self._states.values():
            self.look(generator)
        if not self.found:
            return []
        return [
            Refusal(
                "seeds a generator of random numbers, or sets its state",
                "do so before the step: a graph would not do it again, and goes on drawing where it ended",
                self.line,
            )
        ]


def _state(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _goes_on(generator: torch.Generator, before: bytes, after: bytes) -> bool:
    """Return whether draws can have made a state of the one before."""
    if generator.device.type == "cpu":
        return before == after
    same_seed = before[:_SEED_BYTES] == after[:_SEED_BYTES]
    return same_seed and int.from_bytes(before[_SEED_BYTES:], "little") <= int.from_bytes(after[_SEED_BYTES:], "little")
