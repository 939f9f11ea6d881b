"""Compare what was compiled with eager: the verdict on its results, by one process at a time.

Results that have the bits of others which were compared, in another process or mode, are as right as those
(`suite.measure.judged`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from suite.measure.correctness import (
    Agreement,
    combine,
    compare_widened,
    compare_with_eager,
    distances,
    refused_of_other_inputs,
    tolerance_of,
)
from suite.measure.judged import Judged, JudgedResults
from suite.measure.memory import release
from suite.measure.results import Results
from suite.worker.cell_program import CellProgram
from suite.worker.compilation import CALLS_TO_REPLAY, Compilation
from suite.worker.compile_cache import JUDGED
from suite.worker.protocol import WAITING
from suite.worker.rank_group import RankGroup


class EagerComparison:
    """Compare what a compilation computes. `announce` is called when it waits for its turn, and when it has it."""

    def __init__(self, program: CellProgram, compilation: Compilation, announce: Callable[[str], None]) -> None:
        self._program = program
        self._compilation = compilation
        self._announce = announce

    def verdict(self, kind: str, compiled: list[Results], eager: list[Results]) -> tuple[Agreement, bool]:
        """Return the verdict, and whether all that was compiled had to be forgotten for it.

        Results that are as right as others of this kind, which another process has compared, get their verdict.
        """
        if isinstance(self._program.ranks, RankGroup):
            return self._compared(compiled, eager)[0], False
        shared = JudgedResults(Path(self._program.spec.cache_dir) / JUDGED / kind)
        release(self._program.instance.device)
        # It may run the program in a precision that takes several times the memory, and compile it in that: one process
        # at a time. The runner has a clock on the process that has the turn; the others may wait as long as it takes.
        self._announce(WAITING)
        with self._program.turns.alone(math.inf):
            self._announce("compare")
            if (known := self._known_verdict(shared, compiled, eager)) is not None:
                return known, False
            verdict, found = self._compared(compiled, eager)
            if forgotten := verdict.undecided:
                verdict = self._widened(verdict)
            if verdict.passed:
                shared.add(Judged(tuple(one.all_bits() for one in compiled), tuple(found), verdict))
            release(self._program.instance.device)
        return verdict, forgotten

    def _compared(self, compiled: list[Results], eager: list[Results]) -> tuple[Agreement, list[dict[str, float]]]:
        """Return the verdict by comparison with eager; and the errors of each input set by tensor."""
        with self._program.whole() as (whole, states):
            each = list(zip(compiled, eager, self._program.checked, states, strict=True))
            found = [distances(one, expected, whole, inputs, state) for one, expected, inputs, state in each]
            verdict = combine(
                [
                    compare_with_eager(one, expected, whole, inputs, state, self._program.spec.seed, errors)
                    for (one, expected, inputs, state), errors in zip(each, found, strict=True)
                ]
            )
        return refused_of_other_inputs(verdict, compiled, eager, device=self._program.instance.device), found

    def _known_verdict(self, shared: JudgedResults, compiled: list[Results], eager: list[Results]) -> Agreement | None:
        """Return the verdict on results that are as right as others, which they join where some bits are their own."""
        others: list[Results] = [Results({}) for _ in compiled]

        def errors(place: int, names: Collection[str]) -> dict[str, float]:
            others[place] = Results({name: compiled[place].tensors[name] for name in names})
            found = distances(
                compiled[place],
                eager[place],
                self._program.instance,
                self._program.checked[place],
                self._program.states[place],
                names,
            )
            return {name: found[name] for name in names}

        tolerance = tolerance_of(self._program.instance, self._program.checked[0])
        as_right = shared.as_right([one.all_bits() for one in compiled], errors, tolerance)
        if as_right is None:
            return None
        verdict = refused_of_other_inputs(as_right.verdict, others, eager, device=self._program.instance.device)
        if not verdict.passed:
            return None
        if any(one.tensors for one in others):
            shared.add(as_right)
        return verdict

    def _widened(self, verdict: Agreement) -> Agreement:
        """Return the verdict on a mode that its own dtype does not decide. All that was compiled is forgotten."""
        wide = compare_widened(
            self._compilation.callable_for,
            self._program.instance,
            self._program.checked[0],
            self._program.states[0],
            self._program.spec.seed,
            marks_steps=self._program.marks_steps,
            calls=CALLS_TO_REPLAY,
            forget=self._compilation.forget,
        )
        self._compilation.forget()
        return replace(verdict, passed=verdict.passed and wide.passed, widened_error=wide.max_relative_error)
