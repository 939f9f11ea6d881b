"""Make the commands for the processes of a workload's modes, by what is known of the others. Nothing runs here.

Note [Tuning]: all modes share one compile cache. The first of them that compiles, the reference mode if it is there,
compiles and tunes its kernels while no other is at work, for what others do would disturb the timing that Inductor's
tuning goes by. Then the others compile side by side, and find what it tuned; whatever else a mode tunes, it tunes in
its turn, while no other warms up (`suite.worker.gpu_turns`), and the others find that too. Then they settle side by
side, but for modes where Encore's selection times calls: their processes settle alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from models.registry import Workload
from suite.measure.modes import REFERENCE_MODE, Mode
from suite.results.schema import Correctness
from suite.run.bench import Bench
from suite.run.member import Member
from suite.worker.compile_cache import CompileCache
from suite.worker.protocol import CellSpec, Prepare, Start


class CellCommands:
    """Make commands for members of one workload, one for each rank. `modes` are those that are alive at the same time.

    Attributes:
        first: by mode, what its first process was found to compute. Later ones are told.
        iteration_us: by mode, the time of an iteration there.
    """

    def __init__(self, bench: Bench, workload: Workload, variant: str) -> None:
        self._bench = bench
        self._workload = workload
        self._variant = variant
        self.first: dict[str, Correctness] = {}
        self.iteration_us: dict[str, float] = {}

    def start(self, members: Sequence[Member], modes: Sequence[Mode], cache: CompileCache) -> dict[Member, list[Start]]:
        """Return the commands to start, one for each rank."""
        return {member: [Start(spec=each.spec) for each in self.prepare(member, modes, cache)] for member in members}

    def prepare(self, member: Member, modes: Sequence[Mode], cache: CompileCache) -> list[Prepare]:
        """Return the commands to prepare, one for each rank."""
        spec = self._spec(member, modes, cache)
        own = {"tp": self._workload.tp, "rendezvous": member.worker.rendezvous}
        return [
            Prepare(spec=spec.model_copy(update={**own, "rank": rank, "cache_dir": str(cache.of_rank(rank))}))
            for rank in range(len(member.worker.ranks))
        ]

    def _spec(self, member: Member, modes: Sequence[Mode], cache: CompileCache) -> CellSpec:
        """Return all that a member must know of its cell, but for what differs from rank to rank."""
        mode, later = member.mode, member.process > 0
        toolchain = self._bench.toolchain
        cores = max(1, len(os.sched_getaffinity(0)) // (self._workload.tp or 1))
        share = max(1, cores // len(modes))
        # A pool of compilers takes seconds to start. Those that find their kernels need none; trials do not.
        leads = not later and mode is _first_to_compile(modes, cache)
        compile_threads = cores if leads else 1 if later or not self._workload.stochastic else share
        first = self.first.get(mode.name)
        return CellSpec(
            **{**self._bench.settings.model_dump(), "variant": self._variant},
            workload=self._workload.acronym,
            mode=mode.name,
            cpu_threads=share,
            compile_threads=compile_threads,
            later=later,
            alive_together=1 if later else len(modes),  # more than one later process only where the memory is there
            known_digests=first.digests if first and first.passed else None,
            known_varying=first.varying if first and first.passed else None,
            known_iteration_us=self.iteration_us.get(mode.name),
            cache_dir=str(cache.folder),
            vec_isa_ok=toolchain.vec_isa_ok,
            headers_dir=str(toolchain.headers) if toolchain.headers else None,
            stochastic=self._workload.own is not None and self._workload.stochastic,
        )


def _first_to_compile(modes: Sequence[Mode], cache: CompileCache) -> Mode | None:
    """Return the mode that compiles before the others: see Note [Tuning]. None where one has compiled already."""
    if cache.has_kernels:
        return None
    compiled = sorted((m for m in modes if m.backend is not None), key=lambda mode: mode.name != REFERENCE_MODE)
    return compiled[0] if compiled else None
