"""Hold a mode's process with its results during measuring, and make the mode's row from its processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from models.registry import Workload
from suite.measure.environment import without_paths
from suite.measure.kernels import difference
from suite.measure.modes import Mode
from suite.results.schema import (
    SCHEMA_VERSION,
    Block,
    Cell,
    Correctness,
    Grouping,
    HostUse,
    LaterProcess,
    Metrics,
    Status,
)
from suite.run.process import RankedWorker
from suite.settings import RunSettings
from suite.worker.protocol import Failed, Prepared


@dataclass(slots=True, eq=False)
class Member:
    """Hold a process of a mode (or one for each rank), with its answers so far.

    After a `failure` its worker gets no more commands, and its mode is not started again. `has_started`: it
    has answered. `others`: the load of other programs on the host meanwhile.
    """

    mode: Mode
    process: int
    worker: RankedWorker
    started_at: datetime
    started: float
    correctness: Correctness | None = None
    prepared: Prepared | None = None
    blocks: list[Block] = field(default_factory=list)
    metrics: Metrics | None = None
    failure: Failed | None = None
    has_started: bool = False
    others: HostUse | None = None

    @property
    def out_of_memory(self) -> bool:
        return self.failure is not None and self.failure.status is Status.OOM

    @property
    def is_left_out(self) -> bool:
        """Return whether the row goes without this process: see Note [Short of memory] in `suite.run.runner`."""
        return self.process > 0 and self.out_of_memory

    @property
    def kernels(self) -> dict[str, int] | None:
        return self.metrics.kernels if self.metrics else None


def cell_of(
    workload: Workload,
    variant: str,
    settings: RunSettings,
    processes: Sequence[Member],
    grouping: Grouping,
    group: Sequence[str],
    guests: Sequence[Member] = (),
) -> Cell:
    """Return the row of a mode from its processes. `guests`: modes of its group whose own rows have other blocks.

    A mode fails if one of its processes fails. A later process that ran out of memory is left out: see Note [Short of
    memory] in `suite.run.runner`.
    """
    processes, guests = ([one for one in side if not one.is_left_out] for side in (processes, guests))
    first = processes[0]
    member = next((one for one in processes if one.failure), first)
    failure = member.failure
    prepared = first.prepared
    log_tail = without_paths(member.worker.ranks[failure.rank].log_tail()) if failure else None
    baselines = [guest for guest in guests if guest.mode.name in first.mode.baselines]
    retuned = _retuned(processes)
    number = f"process {member.process + 1}: " if member.process else ""
    return Cell(
        schema_version=SCHEMA_VERSION,
        workload=workload.acronym,
        name=workload.name,
        suite=workload.suite,
        task=workload.task,
        batch=workload.batch,
        dtype_policy=workload.dtype_policy,
        variant=variant,
        size=settings.size,
        mode=member.mode.name,
        baselines=list(member.mode.baselines),
        device=settings.device,
        with_optimizer=settings.with_optimizer,
        seed=settings.seed,
        status=failure.status if failure else Status.PASS,
        error=without_paths(f"{number}{failure.error}") if failure else None,
        log_tail=log_tail or None,
        started_at=first.started_at.isoformat(timespec="seconds"),
        wall_s=round(time.monotonic() - first.started, 3),
        grouping=grouping,
        group=list(group),
        parameters=prepared.parameters if prepared else None,
        input_bytes=prepared.input_bytes if prepared else None,
        correctness=member.correctness or first.correctness,
        compile=prepared.compile if prepared else None,
        metrics=first.metrics,
        blocks=[block for one in processes for block in one.blocks],
        baseline_blocks={
            name: [block for guest in baselines if guest.mode.name == name for block in guest.blocks]
            for name in dict.fromkeys(guest.mode.name for guest in baselines)
        },
        processes=len(processes),
        other_kernels=sorted(retuned.keys() | _retuned(baselines).keys()),
        later=[
            LaterProcess(
                process=one.process,
                compile=one.prepared.compile if one.prepared else None,
                retuned=retuned.get(one.process, []),
            )
            for one in processes[1:]
        ],
        others=max((one.others for one in processes if one.others), key=lambda use: use.cpu_cores or 0.0, default=None),
        tp=workload.tp,
    )


def _retuned(processes: Sequence[Member]) -> dict[int, list[str]]:
    """Return processes that ran other kernels than the first process of the same mode, and which."""
    first: dict[str, dict[str, int]] = {}
    found: dict[int, list[str]] = {}
    for member in processes:
        if member.kernels is not None:
            before = first.setdefault(member.mode.name, member.kernels)
            if member.kernels == before:  # the usual case; finding a difference takes a millisecond
                continue
            if retuned := difference(member.kernels, before).retuned:
                found[member.process] = [*found.get(member.process, ()), *retuned]
    return found
