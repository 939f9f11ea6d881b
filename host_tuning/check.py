"""Report what on this host disturbs measurements of CUDA graphs. Only reads."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum

from host_tuning.gpu import GpuFacts, Nvml
from host_tuning.machine import BOOST, CPU, NO_TURBO, SMT_CONTROL, Machine, format_cpus

DEEP_EXIT_LATENCY_US = 20
"""Sleep states that take longer to leave are deep: a launch of a small graph takes 5 to 20 us."""
BUSY_LOAD = 0.25
"""Runnable processes per CPU, without this one, above which the host counts as busy."""


class Disturbance(StrEnum):
    """Rate a finding. OK: no disturbance from there. WARN: it can move a number. UNKNOWN: the machine does not tell."""

    OK = "ok"
    WARN = "warn"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """Hold one finding: the current value, its effect on CUDA graphs, and advice."""

    item: str
    verdict: Disturbance
    value: str
    why: str
    advice: str | None = None

    def as_json(self) -> dict[str, str | None]:
        return asdict(self)


def check(machine: Machine | None = None, gpus: Nvml | None = None, gpu_index: int = 0) -> tuple[Finding, ...]:
    """Return all findings about this host, in a fixed order. Changes nothing, needs no rights."""
    machine = machine or Machine()
    gpu = (gpus or Nvml()).facts(gpu_index)
    of_host: tuple[Callable[[Machine], Finding], ...] = (_governor, _frequency, _turbo, _idle_states, _smt, _load)
    of_gpu: tuple[Callable[[Machine, GpuFacts], Finding], ...] = (_numa, _processes, _clock, _persistence, _throttling)
    findings = [look(machine) for look in of_host]
    if gpu is None:
        findings.append(
            Finding("gpu", Disturbance.UNKNOWN, "NVML shows no such GPU", "Clocks, neighbours and NUMA are not known.")
        )
    else:
        findings += [look(machine, gpu) for look in of_gpu]
    return tuple(findings)


def _governor(machine: Machine) -> Finding:
    why = "Between two launches the CPU idles; a governor that then lowers its frequency makes the next launch slower."
    governors = sorted({machine.read(f"{policy}/scaling_governor") or "?" for policy in machine.policies})
    if not governors:
        return _unknown("governor", "no cpufreq (as in most virtual machines)", why)
    good = governors == ["performance"]
    return Finding("governor", _verdict(good), ", ".join(governors), why, None if good else "tune --governor")


def _frequency(machine: Machine) -> Finding:
    why = "Host time scales with the CPU's frequency; modes measured at different ones differ for that reason."
    limits = [
        (machine.read_number(f"{policy}/scaling_min_freq"), machine.read_number(f"{policy}/scaling_max_freq"))
        for policy in machine.policies
    ]
    known = [(low, high) for low, high in limits if low is not None and high is not None]
    if not known:
        return _unknown("frequency", "no limits shown", why)
    low, high = min(low for low, _ in known) // 1000, max(high for _, high in known) // 1000
    good = low == high
    value = f"fixed at {high} MHz" if good else f"{low} to {high} MHz"
    return Finding("frequency", _verdict(good), value, why, None if good else "tune --frequency base")


def _turbo(machine: Machine) -> Finding:
    why = "Turbo depends on temperature and on how many cores work: what a neighbour does changes the host's speed."
    no_turbo, boost = machine.read(NO_TURBO), machine.read(BOOST)
    if no_turbo is None and boost is None:
        return _unknown("turbo", "no switch shown", why)
    on = no_turbo == "0" if no_turbo is not None else boost == "1"
    return Finding("turbo", _verdict(not on), "on" if on else "off", why, "tune --no-turbo" if on else None)


def _idle_states(machine: Machine) -> Finding:
    why = "A core that waits for the GPU falls asleep; waking up from a deep state takes longer than a graph launch."
    states = machine.idle_states
    if not states:
        return _unknown("c_states", "no cpuidle (as in most virtual machines)", why)
    deep = {state.name: state.exit_latency_us for state in states if _is_deep(state.exit_latency_us, state.disabled)}
    value = ", ".join(f"{name} ({latency} us)" for name, latency in deep.items()) or "no deep state enabled"
    return Finding("c_states", _verdict(not deep), value, why, "tune --c-states" if deep else None)


def _is_deep(latency_us: int, disabled: bool) -> bool:
    return latency_us > DEEP_EXIT_LATENCY_US and not disabled


def _smt(machine: Machine) -> Finding:
    why = "Two threads of one core share its units; a neighbour on the other thread slows Python down."
    control = machine.read(SMT_CONTROL)
    if control is None:
        return _unknown("smt", "no control shown", why)
    on = control == "on" and machine.read(f"{CPU}/smt/active") != "0"
    return Finding("smt", _verdict(not on), control, why, "tune --smt-off" if on else None)


def _load(machine: Machine) -> Finding:
    why = "Every other process that runs may take the core, the caches and the memory bandwidth of the one measured."
    shown = re.match(r"(\d+\.\d+) \S+ \S+ (\d+)/\d+ ", machine.read("proc/loadavg") or "")
    cpus = machine.online_cpus
    if shown is None or not cpus:
        return _unknown("load", "not shown", why)
    others = max(0, int(shown[2]) - 1)
    busy = others / len(cpus) > BUSY_LOAD or float(shown[1]) / len(cpus) > BUSY_LOAD
    value = f"{shown[1]} over one minute, {others} other processes running, {len(cpus)} CPUs"
    return Finding("load", _verdict(not busy), value, why, "end other work" if busy else None)


def _numa(machine: Machine, gpu: GpuFacts) -> Finding:
    why = "From the other socket every launch and copy crosses the link between sockets, which adds time and noise."
    device = f"sys/bus/pci/devices/{gpu.pci}"
    node, near = machine.read_number(f"{device}/numa_node"), machine.read_cpus(f"{device}/local_cpulist")
    if node is None or not near:
        return _unknown("numa", "the GPU's node is not shown", why)
    allowed = _allowed_cpus(machine)
    far = set(allowed) - set(near)
    value = f"GPU at node {node}, its CPUs are {format_cpus(near)}; this process may run on {format_cpus(allowed)}"
    if not far:
        return Finding("numa", Disturbance.OK, value, why)
    return Finding("numa", Disturbance.WARN, value, why, f"taskset --cpu-list {format_cpus(near)} encore run ...")


def _allowed_cpus(machine: Machine) -> tuple[int, ...]:
    """Return the CPUs this process may run on; of a tree made for tests, its online ones."""
    return tuple(sorted(os.sched_getaffinity(0))) if machine.is_real else machine.online_cpus


def _processes(machine: Machine, gpu: GpuFacts) -> Finding:
    why = "Processes on one GPU take turns, and their kernels share its caches, memory bandwidth and power."
    if gpu.other_processes is None:
        return _unknown("gpu_processes", "NVML does not tell", why)
    count = gpu.other_processes
    return Finding("gpu_processes", _verdict(not count), f"{count} others", why, "end them" if count else None)


def _clock(machine: Machine, gpu: GpuFacts) -> Finding:
    why = "Graphs keep the GPU busier, so it may run at another clock under graphs than without them."
    value = f"{_or_unknown(gpu.sm_clock_mhz)} MHz now, {_or_unknown(gpu.highest_sm_clock_mhz)} MHz at most"
    advice = "NVML does not tell whether a clock is locked; tune --gpu-clock MHZ locks it"
    return Finding("gpu_clock", Disturbance.UNKNOWN, value, why, advice)


def _persistence(machine: Machine, gpu: GpuFacts) -> Finding:
    why = "Without it the driver leaves the GPU whenever no process uses it, and forgets locked clocks."
    if gpu.persistence is None:
        return _unknown("gpu_persistence", "NVML does not tell", why)
    on = gpu.persistence
    return Finding("gpu_persistence", _verdict(on), "on" if on else "off", why, None if on else "tune --persistence")


def _throttling(machine: Machine, gpu: GpuFacts) -> Finding:
    why = "A GPU that lowers its clock for power or heat is slower in the mode that was measured later."
    reasons = gpu.throttling
    value = ", ".join(reasons) or "none"
    return Finding(
        "gpu_throttling", _verdict(not reasons), value, why, "wait, or lock a lower clock" if reasons else None
    )


def _unknown(item: str, value: str, why: str) -> Finding:
    return Finding(item, Disturbance.UNKNOWN, value, why)


def _verdict(good: bool) -> Disturbance:
    return Disturbance.OK if good else Disturbance.WARN


def _or_unknown(value: int | None) -> str:
    return "?" if value is None else str(value)
