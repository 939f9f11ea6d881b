"""Compare compiled results with eager's, in one process at a time.

The modes of a workload compute the same on the same inputs, most of them with the same kernels. A comparison takes
seconds, and minutes where eager is no reference in its dtype and the program is also compiled in higher precision. So
the first process whose results pass stores their digest with the verdict; processes with equal results use it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from optimizations.atomic_file import write_atomically
from suite.measure.correctness import (
    Agreement,
    combine,
    compare_widened,
    compare_with_eager,
    refused_of_other_inputs,
)
from suite.measure.memory import release
from suite.measure.results import Results
from suite.worker.cell_program import CellProgram
from suite.worker.compilation import CALLS_TO_REPLAY, Compilation
from suite.worker.compile_cache import JUDGED
from suite.worker.protocol import WAITING
from suite.worker.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class JudgedResults:
    """Store verdicts in a folder that all processes of a workload share. One process at a time reads and adds."""

    folder: Path

    def add(self, results: Sequence[Results], verdict: Agreement) -> None:
        """Add a verdict for other processes; if it cannot be written, they compare by themselves."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file(results), json.dumps(asdict(verdict)).encode())
        except OSError as error:
            print(f"the verdict is not stored for other processes: {error}")

    def verdict(self, results: Sequence[Results]) -> Agreement | None:
        """Return the stored verdict on results with these bits, one for each input set, or None."""
        file = self._file(results)
        return Agreement(**json.loads(file.read_bytes())) if file.exists() else None

    def _file(self, results: Sequence[Results]) -> Path:
        digests = " ".join(one.digest() for one in results)
        return self.folder / f"{hashlib.sha256(digests.encode()).hexdigest()}.json"


class EagerComparison:
    """Compare a compiled program's results. `announce` is called before waiting for the lock, and after taking it."""

    def __init__(self, program: CellProgram, compilation: Compilation, announce: Callable[[str], None]) -> None:
        self._program = program
        self._compilation = compilation
        self._announce = announce

    def verdict(self, kind: str, compiled: list[Results], eager: list[Results]) -> tuple[Agreement, bool]:
        """Return the verdict, and whether the compiled code was dropped to obtain it.

        Results that are bitwise equal to results of this kind in another process get their stored verdict.
        """
        if isinstance(self._program.ranks, RankGroup):
            return self._compared(compiled, eager), False
        shared = JudgedResults(Path(self._program.spec.cache_dir) / JUDGED / kind)
        release(self._program.instance.device)
        # A comparison may run and compile the program in a precision that needs several times the memory, so only one
        # process compares at a time. The runner limits the time of that process; the others wait without a limit.
        self._announce(WAITING)
        with self._program.turns.alone(math.inf):
            self._announce("compare")
            if (known := shared.verdict(compiled)) is not None:
                return known, False
            verdict = self._compared(compiled, eager)
            if forgotten := verdict.undecided:
                verdict = self._widened(verdict)
            if verdict.passed:
                shared.add(compiled, verdict)
            release(self._program.instance.device)
        return verdict, forgotten

    def _compared(self, compiled: list[Results], eager: list[Results]) -> Agreement:
        """Return the verdict by comparison with eager."""
        with self._program.whole() as (whole, states):
            seed = self._program.spec.seed
            verdict = combine(
                [
                    compare_with_eager(one, expected, whole, inputs, state, seed)
                    for one, expected, inputs, state in zip(compiled, eager, self._program.checked, states, strict=True)
                ]
            )
        return refused_of_other_inputs(verdict, compiled, eager, device=self._program.instance.device)

    def _widened(self, verdict: Agreement) -> Agreement:
        """Return the verdict in higher precision, where the own dtype decides nothing; drop the compiled code."""
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
