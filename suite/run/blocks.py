"""Measure blocks of processes that are alive together, in turn.

Other programs on the host use its cores and caches, so their load meanwhile is noted: the host's processor time less
that of this program and its children. A container may hide other processes, but in most the kernel's counters of
processor time are of the whole host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import psutil

from suite.results import stats
from suite.results.schema import HostUse
from suite.run.group import GroupSession
from suite.run.member import Member
from suite.run.schedule import least_blocks, orders, sampling_for
from suite.run.supervise import tree_cpu_s
from suite.settings import RunSettings
from suite.worker.protocol import BLOCKS_PER_CORE, Measure, core_for


def measure_blocks(session: GroupSession, members: Sequence[Member]) -> None:
    """Measure blocks of all members, in an order that changes from block to block. A member that fails drops out.

    At least as many as the settings say, then more until every ratio would be narrow enough or the time is over.
    """
    bench, workload = session.bench, session.workload
    settings = bench.settings
    cores = sorted(os.sched_getaffinity(0)) if settings.device == "cuda" else []
    by_name = {member.mode.name: member for member in members}
    seed = f"{settings.seed} {workload.acronym} {members[0].process if members else 0}"
    others = watch_others()
    begin = time.monotonic()
    turn = 0
    for index, order in enumerate(orders(list(by_name), seed)):
        seconds = time.monotonic() - begin
        if index >= least_blocks(seconds, settings) and _enough(settings, members, index, seconds):
            break
        asked = [by_name[name] for name in order if by_name[name].failure is None]
        if not asked:
            break
        for member in asked:
            if index == 0:
                bench.say(f"{workload.acronym} {member.mode.name}: measure")
            session.converse({member: _measure_command(settings, member, index, turn, cores)})
            turn += 1
    use = others()
    for member in members:
        member.others = use
        if member.failure is None:
            bench.say(f"{workload.acronym} {member.mode.name}: measured {len(member.blocks)} blocks")


def watch_others() -> Callable[[], HostUse]:
    """Return a function that returns the load of other programs from now until its call."""
    begun_s, host_s, own_s = time.monotonic(), _host_cpu_s(), tree_cpu_s(psutil.Process())

    def others() -> HostUse:
        elapsed_s, host_used_s = time.monotonic() - begun_s, _host_cpu_s() - host_s
        others_s = max(0.0, host_used_s - (tree_cpu_s(psutil.Process()) - own_s))
        # Without the kernel's counters the load is unknown.
        return HostUse(cpu_cores=round(others_s / elapsed_s, 2) if elapsed_s > 0 and host_used_s > 0 else None)

    return others


def _host_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))


def _enough(settings: RunSettings, members: Sequence[Member], blocks: int, seconds: float) -> bool:
    if blocks >= settings.most_blocks or seconds >= settings.measure_s:
        return True
    if blocks % BLOCKS_PER_CORE:
        return False
    samples = {m.mode.name: [block.host_us for block in m.blocks] for m in members if m.failure is None}
    return all(
        stats.narrow_enough(samples[baseline], samples[member.mode.name], settings.processes or 1)
        for member in members
        for baseline in member.mode.compared_with
        if member.mode.name in samples and baseline in samples
    )


def _measure_command(
    settings: RunSettings, member: Member, index: int, turn: int, cores: Sequence[int]
) -> list[Measure]:
    """Return a command for each rank: they differ in the core."""
    assert member.prepared is not None, "a member without a failure is prepared"
    lead_in, samples = sampling_for(member.prepared.iteration_us, settings)
    ranks = len(member.worker.ranks)
    return [
        Measure(
            process=member.process,
            index=index,
            turn=turn,
            samples=samples,
            lead_in=lead_in,
            core=core_for(index, cores, process=member.process, rank=rank, ranks=ranks),
        )
        for rank in range(ranks)
    ]
