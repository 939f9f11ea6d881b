"""Compare the bits of a cell's results: with those of another process or mode, and from call to call.

Of a tensor that has other bits in each call they compare a sketch (`suite.measure.fingerprint`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from models.registry import Inputs
from suite.measure.correctness import tolerance_of
from suite.measure.fingerprint import sketched_error
from suite.measure.results import State, bits_of_run, digest_of
from suite.worker.cell_program import CellProgram
from suite.worker.compilation import Compilation


class ResultBits:
    """Take the bits of what a compilation computes on the checked inputs of its program."""

    def __init__(self, program: CellProgram, compilation: Compilation) -> None:
        self._program = program
        self._compilation = compilation

    def as_in_the_first_process(self) -> bool:
        """Return whether the compiled iteration has the digests of the mode's first process, and what varies from call
        to call is within the tolerance."""
        varying = self._program.spec.known_varying or [{}] * len(self._program.checked)
        tolerance = tolerance_of(self._program.instance, self._program.checked[0])
        digests, near = [], True
        for inputs, state, known in zip(self._program.checked, self._program.states, varying, strict=True):
            bits, found = self.of_run(inputs, state, sketched=known)
            digests.append(digest_of({name: each for name, each in bits.items() if name not in known}))
            near &= all(
                name in found and sketched_error(found[name], sketch) <= tolerance
                for name, sketch in known.items()
                if sketch  # or it is not there in every call
            )
        return near and digests == self._program.spec.known_digests

    def of_run(
        self, inputs: Inputs, state: State, sketched: Collection[str] = ()
    ) -> tuple[dict[str, str], dict[str, list[float]]]:
        """Return the bits of what the compiled iteration computes, and sketches of some tensors: see `bits_of_run`."""
        return bits_of_run(
            self._program.instance, self._compilation.iterate, inputs, state, self._program.spec.seed, sketched
        )

    def repeated(self, bits: Sequence[Mapping[str, str]]) -> tuple[list[str], list[dict[str, list[float]]]]:
        """Return digests, and sketches of the tensors that vary from call to call, each by input set.

        `bits` are those of the calls before; they are made again, to see which tensors stay the same. One that varies
        on an input set counts as varying on all: two calls may have the same bits by chance.
        """
        varying: list[dict[str, list[float]]] = []
        digests: list[str] = []
        checked = list(zip(bits, self._program.checked, self._program.states, strict=bool(bits)))
        others: set[str] = set()
        for first, inputs, state in checked:
            again, _ = self.of_run(inputs, state)
            others |= {name for name in {**first, **again} if first.get(name) != again.get(name)}
        sketching = self._program.ranks.any(bool(others))
        for first, inputs, state in checked:
            sketches = self.of_run(inputs, state, others)[1] if sketching else {}
            varying.append({name: sketches.get(name, []) for name in sorted(others)})
            digests.append(digest_of({name: each for name, each in first.items() if name not in others}))
        return digests, varying
