"""Run one workload's cells during their lifetime: start, prepare, compare, profile and end them.

The runner decides which modes are alive at the same time; a `GroupSession` runs the steps of its modes. Between the
steps `suite.run.blocks` measures blocks.

Note [Tuning]: all modes share one compile cache. The first mode to compile, the reference mode if it is selected,
compiles and tunes its kernels while no other process works, because load would disturb Inductor's timing of
candidates. Then the others compile concurrently and find these results in the cache. A mode tunes its remaining kernels
under a lock, while no other warms up (`suite.worker.gpu_turns`), and the results are shared too. Then the modes settle
concurrently.

Outputs of a mode are compared with those of other modes, bit for bit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from models.registry import Workload
from suite.measure.modes import GRAPH_MODE, REFERENCE_MODE, UNPARTITIONED_MODE, Mode
from suite.results.schema import CompileConditions, CompileTimes, Correctness, Status
from suite.run.member import Member
from suite.run.process import RankedWorker, converse, end
from suite.settings import RunSettings
from suite.worker.compile_cache import CompileCache
from suite.worker.protocol import (
    CellSpec,
    Collect,
    Collected,
    Command,
    Compile,
    Done,
    Failed,
    Measured,
    Prepare,
    Prepared,
    Settle,
    Start,
)

WORKER_BYTES = 3 * 2**30
"""Host memory assumed for a worker that has imported torch and waits."""


@dataclass(slots=True)
class Bench:
    """Hold settings and tools of all cells of a run. `timeout_s` bounds each phase of a worker; `say` prints an event.

    Testing the host's compilers takes many seconds, so only the first process that compiles does it (`tested`), and all
    later ones get what it found (`vec_isa_ok`). `headers` is a folder for compiled headers; None: each process compiles
    its own.
    """

    settings: RunSettings
    logs: Path
    timeout_s: float
    worker_command: Sequence[str]
    say: Callable[[str], None]
    headers: Path | None = None
    vec_isa_ok: bool | None = None
    tested: bool = False


class GroupSession:
    """Run the steps of a group of modes of one workload.

    Modes that were prepared are known with their correctness, for the bitwise comparison. A mode that is prepared again
    in another group adds an entry.

    Note [Later processes]: importing torch, starting the compilers and calling a program for the first time takes
    longer than measuring, and mostly uses one core. So where the host has the memory, later processes start while the
    first ones compile concurrently, and then wait. Waiting processes have at most a context on
    the GPU, and no tensors.
    """

    def __init__(self, bench: Bench, workload: Workload, variant: str, cache: CompileCache) -> None:
        self.bench = bench
        self.workload = workload
        self.variant = variant
        self._known: dict[str, list[Correctness]] = {}
        self._first: dict[str, Prepared] = {}  # by mode, the answer of its first process
        self._cache = cache
        self._waiting: dict[tuple[str, int], Member] = {}
        self._expected: Sequence[Mode] = ()

    @contextmanager
    def alive(
        self, modes: Sequence[Mode], process: int = 0, cache: CompileCache | None = None
    ) -> Iterator[list[Member]]:
        """Yield workers of these modes, prepared and compared bit for bit. All are ended on the way out."""
        members: list[Member] = []
        finished = False
        try:
            for mode in modes:
                key = (mode.name, process)
                members.append(self._waiting.pop(key) if key in self._waiting else self._start(mode, process))
            self._prepare(members, cache or self._cache)
            yield members
            finished = True
        finally:
            # A failed worker gets no `stop`: it hangs, or has ended.
            end([m.worker for m in members if m.failure is not None or not finished], ask_first=False)
            end([m.worker for m in members if m.failure is None and finished], ask_first=True)

    @contextmanager
    def later_processes(self) -> Iterator[None]:
        """End on the way out the processes that were expected and have not been used."""
        try:
            yield
        finally:
            unused = list(self._waiting.values())
            self._waiting.clear()
            end([member.worker for member in unused], ask_first=False)

    def expect(self, modes: Sequence[Mode], processes: Sequence[int]) -> None:
        """Register processes of each mode to start while modes next compile concurrently: see Note [Later processes].

        Where the host's memory is too small for all, the last ones are left out.
        """
        self._expected = modes
        of_each = len(modes) * (self.workload.tp or 1) * WORKER_BYTES
        there = psutil.virtual_memory().available
        for count, process in enumerate(processes, start=1):
            if count * of_each < there:
                for mode in modes:
                    self._waiting[mode.name, process] = self._start(mode, process)

    def collect(self, members: Sequence[Member], whole: Collection[Member]) -> None:
        """Collect metrics of one member after the other, because concurrent load would disturb times and profiles.

        All members load the profiler at the same time. Members that are not in `whole` only report their kernels, all
        at the same time.
        """
        for member in members:
            if member.failure is None:
                self._say_phase(member, "metrics")
        first = [member for member in members if member in whole]
        for member in first:
            self._send([member], Collect(step="once"))
        self._send(first, Collect(step="profiler"))
        for member in first:
            self._send([member], Collect(step="metrics"))
        self._send([member for member in members if member not in whole], Collect(step="kernels"))

    def cold_compile_times(self, mode: Mode, cache: CompileCache) -> CompileTimes | None:
        """Return the compile times of the mode alone with an empty cache.

        Return None if it fails, with a note: the row has other times, and its status is that of its own processes.
        """
        with self.alive([mode], cache=cache) as (member,):
            if member.failure is not None:
                self._say_phase(member, f"no compile times with an empty cache: {member.failure.error}")
                return None
            return member.prepared.compile if member.prepared else None

    def _say_phase(self, member: Member, phase: str) -> None:
        self.bench.say(f"{self.workload.acronym} {member.mode.name}: {phase}")

    def _start(self, mode: Mode, process: int) -> Member:
        of = "" if self.variant == self.workload.variants[0] else f".{self.variant}"
        log = self.bench.logs / f"{self.workload.acronym}{of}.{mode.name}.log"
        now = time.monotonic()
        worker = RankedWorker(self.bench.worker_command, log, self.workload.tp or 1, self.bench.settings.device)
        return Member(mode, process, worker, datetime.now(UTC), now)

    def _prepare(self, members: Sequence[Member], cache: CompileCache) -> None:
        modes = [member.mode for member in members]
        compiling = [member for member in members if member.mode.backend is not None]
        if compiling and not self.bench.tested:
            self.bench.tested = True
            self.converse(self._start_commands(compiling[:1], modes, cache))
        self.converse(
            {member: self._prepare_commands(member, modes, cache) for member in members if not member.failure}
        )
        if do_not_fit(members):
            return  # they will be measured in smaller groups, and those that wait would start for nothing
        self._compile(members, cache)
        self._send(members, Settle())
        found = {m: self._correctness(m.prepared, m.mode) for m in members if m.prepared is not None}
        for member, own in found.items():
            self._known.setdefault(member.mode.name, []).append(own)
        for member, own in found.items():
            member.correctness = compare_bitwise(member.mode, own, self._known)
            member.failure = bitwise_failure(member.mode, member.correctness)

    def _correctness(self, prepared: Prepared, mode: Mode) -> Correctness:
        """Return the correctness of a process: its own, or that of the mode's first process, whose digests it has."""
        own = prepared.correctness or self._first[mode.name].correctness
        assert own is not None, "a first process compares its results"
        return own

    def _compile(self, members: Sequence[Member], cache: CompileCache) -> None:
        """Compile members: the first alone if no mode has compiled yet, then the others concurrently.

        See Note [Tuning].
        """
        cold = [member for member in members if member.mode.backend is not None and not cache.has(member.mode)]
        warm = [member for member in members if member not in cold]
        cold.sort(key=lambda member: member.mode.name != REFERENCE_MODE)
        while cold and not cache.has_kernels:
            self._compile_side_by_side([cold.pop(0)], (), cache)
        self._compile_side_by_side(cold, warm, cache)

    def _compile_side_by_side(self, cold: Sequence[Member], warm: Sequence[Member], cache: CompileCache) -> None:
        """Compile `cold` members, whose modes have not compiled before, and `warm` ones; start waiting ones as well."""
        cold = [member for member in cold if not member.failure]
        conditions = cache.conditions(len(cold))
        by_member = {**dict.fromkeys(cold, conditions), **dict.fromkeys(warm, CompileConditions.WARM)}
        self.converse(
            {
                **self._start_waiting(),
                **{m: [Compile(conditions=by_member[m])] * len(m.worker.ranks) for m in by_member if not m.failure},
            }
        )
        for member in cold:
            if not member.failure:  # or there may be nothing in the cache
                cache.compiled(member.mode)

    def _send(self, members: Sequence[Member], command: Command) -> None:
        """Send the same command to all members that have not failed, at the same time."""
        self.converse({m: [command] * len(m.worker.ranks) for m in members if m.failure is None})

    def converse(self, commands: Mapping[Member, Sequence[Command]]) -> None:
        """Send each member its command (one for each rank), all at the same time, and keep the answers."""
        members = {member.worker: member for member in commands}
        answers = converse(
            {member.worker: command for member, command in commands.items()},
            self.bench.timeout_s,
            lambda worker, phase: self._say_phase(members[worker], phase),
        )
        for worker, answer in answers.items():
            member = members[worker]
            member.has_started = True
            match answer:
                case Prepared() as prepared:
                    member.prepared = prepared
                    self._first.setdefault(member.mode.name, prepared)
                case Measured(block=block):
                    member.blocks.append(block)
                case Collected(metrics=metrics):
                    member.metrics = metrics or member.metrics
                case Done() as done:
                    self.bench.vec_isa_ok = self.bench.vec_isa_ok or done.vec_isa_ok
                case Failed() as failure:
                    member.failure = failure
                    member.correctness = failure.correctness or member.correctness  # earlier findings stay valid

    def _start_waiting(self) -> dict[Member, list[Start]]:
        """Return commands for waiting members that have not been started."""
        waiting = [member for member in self._waiting.values() if not member.has_started]
        return self._start_commands(waiting, self._expected, self._cache)

    def _start_commands(
        self, members: Sequence[Member], modes: Sequence[Mode], cache: CompileCache
    ) -> dict[Member, list[Start]]:
        return {
            member: [Start(spec=each.spec) for each in self._prepare_commands(member, modes, cache)]
            for member in members
        }

    def _prepare_commands(self, member: Member, modes: Sequence[Mode], cache: CompileCache) -> list[Prepare]:
        """Return the commands to prepare, one for each rank. `modes` are those that are alive at the same time."""
        spec = self._spec(member, modes, cache)
        own = {"tp": self.workload.tp, "rendezvous": member.worker.rendezvous}
        return [
            Prepare(spec=spec.model_copy(update={**own, "rank": rank, "cache_dir": str(cache.of_rank(rank))}))
            for rank in range(len(member.worker.ranks))
        ]

    def _spec(self, member: Member, modes: Sequence[Mode], cache: CompileCache) -> CellSpec:
        """Return the specification of a member's cell, without the fields that differ between ranks."""
        mode, later = member.mode, member.process > 0
        cores = max(1, len(os.sched_getaffinity(0)) // (self.workload.tp or 1))
        share = max(1, cores // len(modes))
        # A pool of compilers takes seconds to start. Members that find their kernels in the cache need none.
        leads = not later and mode is _first_to_compile(modes, cache)
        compile_threads = cores if leads else 1 if later or not self.workload.stochastic else share
        first = self._first.get(mode.name)
        passed = first.correctness if first and first.correctness and first.correctness.passed else None
        return CellSpec(
            **{**self.bench.settings.model_dump(), "variant": self.variant},
            workload=self.workload.acronym,
            mode=mode.name,
            cpu_threads=share,
            compile_threads=compile_threads,
            alive_together=1 if later else len(modes),
            known_digests=passed.digests if passed else None,
            known_varying=passed.varying if passed else None,
            known_iteration_us=first.iteration_us if first else None,
            cache_dir=str(cache.folder),
            vec_isa_ok=self.bench.vec_isa_ok,
            headers_dir=str(self.bench.headers) if self.bench.headers else None,
            stochastic=self.workload.own is not None and self.workload.stochastic,
        )


def _first_to_compile(modes: Sequence[Mode], cache: CompileCache) -> Mode | None:
    """Return the mode that compiles before the others: see Note [Tuning]. None where one has compiled already."""
    if cache.has_kernels:
        return None
    compiled = sorted((m for m in modes if m.backend is not None), key=lambda mode: mode.name != REFERENCE_MODE)
    return compiled[0] if compiled else None


def do_not_fit(members: Sequence[Member]) -> bool:
    """Return whether a first process ran out of memory while several modes were alive together."""
    return len(members) > 1 and any(member.out_of_memory and not member.process for member in members)


_ONE_PROGRAM = frozenset({REFERENCE_MODE, UNPARTITIONED_MODE})
"""Modes that run the same kernels: agreement of both says no more than one of them."""


def compare_bitwise(mode: Mode, own: Correctness, known: Mapping[str, Sequence[Correctness]]) -> Correctness:
    """Return `own` with the result of the bitwise comparison, if the mode has one.

    Modes with CUDA graphs are compared with `bitwise_with`, or for information with stock graphs, if the results of the
    other mode are deterministic. Equality with one of them is enough. The verdict is None if the mode equals none of
    them and they differ from each other, too: then the bits depend on the process, because each tunes its own kernels
    or computes part of the program on another device. Modes in `_ONE_PROGRAM` run the same kernels, so if only these
    were run, nothing is known about that.
    """
    others = mode.bitwise_with or ((GRAPH_MODE,) if mode.uses_cuda_graphs and mode.name != GRAPH_MODE else ())
    if not others:
        return own
    found = {name: [one.digests for one in known.get(name, ()) if one.deterministic] for name in others}
    equal = next((name for name in others if own.digests in found[name]), None)
    bits = [digests for several in found.values() for digests in several]
    differ = not _ONE_PROGRAM.issuperset(name for name in others if found[name])
    agreed = differ and all(digests == bits[0] for digests in bits)
    if equal is not None:
        return own.model_copy(update={"bitwise_with": equal, "bitwise": True})
    compared = next((name for name in others if found[name]), others[0])
    return own.model_copy(update={"bitwise_with": compared, "bitwise": False if agreed else None})


def bitwise_failure(mode: Mode, correctness: Correctness) -> Failed | None:
    """Return the failure of a mode that must equal another one bit for bit and does not."""
    if not mode.bitwise_with or correctness.bitwise is not False:
        return None
    return Failed(
        status=Status.FAIL_ACCURACY,
        error=f"outputs must equal those of {' or '.join(mode.bitwise_with)} bit for bit (a mode that is deterministic "
        "with itself), and do not",
        correctness=correctness,
    )
