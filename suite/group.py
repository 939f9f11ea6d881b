"""One workload's cells while they live: started, prepared, compared, measured in turn, profiled, ended.

Which modes are alive at the same time is the runner's business; a `Session` does the steps for those it is given.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from models.registry import Workload
from suite.environment import without_paths
from suite.guard import temporary_folder
from suite.modes import GRAPH_MODE, Mode
from suite.process import Worker, converse, end
from suite.progress import Display
from suite.protocol import CellSpec, Collected, CollectMetrics, Command, Failed, Measure, Measured, Prepare, Prepared
from suite.schedule import split_samples
from suite.schema import SCHEMA_VERSION, Block, Cell, Correctness, Grouping, Metrics, Status
from suite.settings import RunSettings


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cells of a run share. `timeout_s` bounds each phase of a worker."""

    settings: RunSettings
    logs: Path
    warm_cache: Path
    timeout_s: float
    worker_command: Sequence[str]
    display: Display


@dataclass(slots=True, eq=False)
class Member:
    """A cell with a live worker, and what it has brought so far. `failure` set means its worker is not asked again."""

    mode: Mode
    worker: Worker
    started_at: datetime
    started: float
    correctness: Correctness | None = None
    prepared: Prepared | None = None
    blocks: list[Block] = field(default_factory=list)
    metrics: Metrics | None = None
    failure: Failed | None = None

    @property
    def out_of_memory(self) -> bool:
        return self.failure is not None and self.failure.status is Status.OOM


class Session:
    """The steps of a group of modes of one workload.

    `known` holds the correctness of modes of this workload that were prepared before, for the bitwise comparison. What
    is prepared again, in another group, is one more to compare with: its kernels may have been tuned otherwise.
    """

    def __init__(self, bench: Bench, workload: Workload, variant: str, known: Mapping[str, Correctness]) -> None:
        self.bench = bench
        self.workload = workload
        self.variant = variant
        self._known = {name: [correctness] for name, correctness in known.items()}

    @contextmanager
    def alive(self, modes: Sequence[Mode]) -> Iterator[list[Member]]:
        """Workers of these modes, prepared side by side and compared bit for bit. All are ended on the way out."""
        members: list[Member] = []
        finished = False
        with temporary_folder("encore-cache-") as caches:
            try:
                for mode in modes:
                    members.append(self._start(mode))
                self._prepare(members, caches)
                yield members
                finished = True
            finally:
                # One that failed is not asked: it hangs, or has nothing more to say.
                end([m.worker for m in members if m.failure is not None or not finished], ask_first=False)
                end([m.worker for m in members if m.failure is None and finished], ask_first=True)

    def measure(self, members: Sequence[Member]) -> None:
        """Blocks of all members in turn, A B C A B C, replacing those they had. A member that fails drops out."""
        for member in members:
            member.blocks = []
        turn = 0
        sizes = split_samples(self.bench.settings.samples, self.bench.settings.blocks)
        for index, samples in enumerate(sizes):
            for member in members:
                if member.failure is not None:
                    continue
                if index == 0:
                    self.bench.display.phase(member.mode.name, "measure")
                ask = Measure(index=index, turn=turn, samples=samples, throughput_iterations=samples)
                turn += 1
                if isinstance(answer := self._ask(member, ask), Measured):
                    member.blocks.append(answer.block)
                    self.bench.display.block_measured(member.mode.name, index + 1, len(sizes))

    def collect(self, members: Sequence[Member]) -> None:
        """Metrics, one member after the other: a profiler must not see its neighbours' load."""
        for member in members:
            if member.failure is None:
                self.bench.display.phase(member.mode.name, "metrics")
                if isinstance(answer := self._ask(member, CollectMetrics()), Collected):
                    member.metrics = answer.metrics

    def cell(self, member: Member, grouping: Grouping, group: Sequence[Member], guests: Sequence[Member] = ()) -> Cell:
        """The row of a member as it stands. `guests` are those of its group whose own rows have other blocks."""
        failure, prepared, settings = member.failure, member.prepared, self.bench.settings
        log_tail = without_paths(member.worker.log_tail()) if failure else None
        return Cell(
            schema_version=SCHEMA_VERSION,
            workload=self.workload.acronym,
            name=self.workload.name,
            suite=self.workload.suite,
            task=self.workload.task,
            batch=self.workload.batch,
            dtype_policy=self.workload.dtype_policy,
            variant=self.variant,
            size=settings.size,
            mode=member.mode.name,
            baselines=list(member.mode.baselines),
            device=settings.device,
            with_optimizer=settings.with_optimizer,
            seed=settings.seed,
            status=failure.status if failure else Status.PASS,
            error=without_paths(failure.error) if failure else None,
            log_tail=log_tail or None,
            started_at=member.started_at.isoformat(timespec="seconds"),
            wall_s=round(time.monotonic() - member.started, 3),
            grouping=grouping,
            group=[other.mode.name for other in group],
            parameters=prepared.parameters if prepared else None,
            input_bytes=prepared.input_bytes if prepared else None,
            correctness=member.correctness,
            compile=prepared.compile if prepared else None,
            metrics=member.metrics,
            blocks=member.blocks,
            baseline_blocks={
                guest.mode.name: list(guest.blocks) for guest in guests if guest.mode.name in member.mode.baselines
            },
        )

    def _start(self, mode: Mode) -> Member:
        log = self.bench.logs / f"{self.workload.acronym}.{mode.name}.log"
        now = time.monotonic()
        return Member(mode, Worker(self.bench.worker_command, log), datetime.now(UTC), now)

    def _prepare(self, members: Sequence[Member], caches: Path) -> None:
        modes = {member.worker: member.mode.name for member in members}
        answers = converse(
            {member.worker: Prepare(spec=self._spec(member.mode, len(members), caches)) for member in members},
            self.bench.timeout_s,
            lambda worker, phase: self.bench.display.phase(modes[worker], phase),
        )
        for member in members:
            match answers[member.worker]:
                case Prepared() as prepared:
                    member.prepared = prepared
                    member.correctness = prepared.correctness
                    self._known.setdefault(member.mode.name, []).append(prepared.correctness)
                case Failed() as failure:
                    member.failure = failure
                    member.correctness = failure.correctness
        for member in members:
            if member.prepared is not None:
                member.correctness = compare_bitwise(member.mode, member.prepared.correctness, self._known)
                member.failure = bitwise_failure(member.mode, member.correctness, self.workload)

    def _spec(self, mode: Mode, side_by_side: int, caches: Path) -> CellSpec:
        settings = self.bench.settings
        cache = self.bench.warm_cache if settings.warm_cache else caches / mode.name
        cache.mkdir(parents=True, exist_ok=True)
        return CellSpec(
            workload=self.workload.acronym,
            variant=self.variant,
            size=settings.size,
            mode=mode.name,
            device=settings.device,
            with_optimizer=settings.with_optimizer,
            seed=settings.seed,
            input_sets=settings.input_sets,
            warm_up=settings.warm_up,
            check_inputs=settings.check_inputs,
            cpu_threads=max(1, len(os.sched_getaffinity(0)) // side_by_side),
            cache_dir=str(cache),
            warm_cache=settings.warm_cache,
        )

    def _ask(self, member: Member, command: Command) -> Measured | Collected | None:
        answer = converse({member.worker: command}, self.bench.timeout_s)[member.worker]
        if isinstance(answer, Failed):
            member.failure = answer
            return None
        assert not isinstance(answer, Prepared), "converse lets only the answer to the command through"
        return answer


def compare_bitwise(mode: Mode, own: Correctness, known: Mapping[str, Sequence[Correctness]]) -> Correctness:
    """`own` with the bitwise comparison filled in, where the mode has one to make.

    Modes with CUDA graphs are compared with `bitwise_with`, or for information with stock graphs; only if the other
    mode is deterministic with itself, since otherwise a difference would say nothing. One that is equal is enough. No
    verdict (None) where none is equal and they do not agree with one another either: then the program has no bits of
    its own, for Inductor tuned its kernels anew or computes part of it elsewhere in each of them.
    """
    others = mode.bitwise_with or ((GRAPH_MODE,) if mode.uses_cuda_graphs and mode.name != GRAPH_MODE else ())
    if not others:
        return own
    found = {name: [one.digests for one in known.get(name, ()) if one.deterministic] for name in others}
    equal = next((name for name in others if own.digests in found[name]), None)
    bits = [digests for several in found.values() for digests in several]
    agreed = bool(bits) and all(digests == bits[0] for digests in bits)
    if equal is not None:
        return own.model_copy(update={"bitwise_with": equal, "bitwise": True})
    compared = next((name for name in others if found[name]), others[0])
    return own.model_copy(update={"bitwise_with": compared, "bitwise": False if agreed else None})


def bitwise_failure(mode: Mode, correctness: Correctness, workload: Workload) -> Failed | None:
    """The failure of a mode that must equal another one bit for bit and does not.

    Where cuDNN measures its algorithms, each process may pick others, and other bits are no finding.
    """
    if not mode.bitwise_with or correctness.bitwise is not False or workload.cudnn_benchmark:
        return None
    return Failed(
        status=Status.FAIL_ACCURACY,
        error=f"outputs must equal those of {' or '.join(mode.bitwise_with)} bit for bit (a mode that is deterministic "
        "with itself), and do not",
        correctness=correctness,
    )
