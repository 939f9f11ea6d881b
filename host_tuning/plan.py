"""Convert a request into writes of files, or a refusal that names all obstacles.

Note [Order]: writes are undone in reverse, and every state on the way must be one the kernel takes. A lower limit may
never pass an upper one, so where both go up the upper one is first. Energy preferences cannot be written under the
performance governor: they come before it. Turbo comes after the limits: as long as it is off, the kernel shows
upper limits cut to the base frequency. Threads go offline last: their files vanish with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from host_tuning.change import Change, Kind
from host_tuning.check import DEEP_EXIT_LATENCY_US
from host_tuning.errors import Refused
from host_tuning.gpu import Nvml
from host_tuning.machine import BOOST, CPU, NO_TURBO, SMT_CONTROL, VENDORS, Machine

DRIVERS = ("intel_pstate", "intel_cpufreq", "acpi-cpufreq", "amd-pstate", "amd-pstate-epp")
"""cpufreq drivers whose files are supported."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """Hold the requested changes. `frequency` is "base" or a number of MHz."""

    governor: bool = False
    frequency: str | None = None
    no_turbo: bool = False
    c_states: bool = False
    smt_off: bool = False
    persistence: bool = False
    gpu_clock: int | None = None
    gpu: int = 0

    @property
    def is_empty(self) -> bool:
        return not any(getattr(self, field.name) for field in fields(self) if field.name != "gpu")


class _Cannot(Exception):
    """Report one item that cannot be done here, and why."""


def plan(wishes: Wishes, machine: Machine, gpus: Nvml) -> tuple[Change, ...]:
    """Return the writes, in the order they are to be made, without those that would change nothing.

    Raises:
        Refused: no setting is named, or this machine lacks one; the message names each.
    """
    if wishes.is_empty:
        raise Refused("tune changes only what it is asked for: name at least one setting (see tune --help)")
    reasons: list[str] = []
    changes: list[Change] = []
    for asked, item, make in _items(wishes, machine, gpus):
        if not asked:
            continue
        try:
            changes += make()
        except _Cannot as cannot:
            reasons.append(f"{item}: {cannot}")
    if reasons:
        raise Refused("nothing was changed, because this machine does not offer what was asked: " + "; ".join(reasons))
    return tuple(change for change in changes if change.before != change.after)


def _items(wishes: Wishes, machine: Machine, gpus: Nvml) -> tuple[tuple[bool, str, Callable[[], list[Change]]], ...]:
    """Return the items in the order of Note [Order]."""
    return (
        (wishes.governor, "governor", lambda: _governor(machine)),
        (bool(wishes.frequency), "frequency", lambda: _frequency(machine, wishes.frequency or "")),
        (wishes.no_turbo, "turbo", lambda: _no_turbo(machine)),
        (wishes.c_states, "c_states", lambda: _c_states(machine)),
        (wishes.smt_off, "smt", lambda: _smt_off(machine)),
        (wishes.persistence, "gpu_persistence", lambda: _persistence(gpus, wishes.gpu)),
        (wishes.gpu_clock is not None, "gpu_clock", lambda: _gpu_clock(gpus, wishes.gpu, wishes.gpu_clock or 0)),
    )


def _known_cpu(machine: Machine) -> None:
    if machine.vendor is None:
        known = " and ".join(VENDORS.values())
        raise _Cannot(f"CPU {machine.model or 'of unknown kind'} is not one of {known}, whose files are known here")


def _policies(machine: Machine) -> list[str]:
    _known_cpu(machine)
    policies = machine.policies
    if not policies:
        raise _Cannot("the kernel shows no cpufreq, as in most virtual machines; set it on the host of this machine")
    for policy in policies:
        if (driver := machine.read(f"{policy}/scaling_driver")) not in DRIVERS:
            raise _Cannot(f"cpufreq driver {driver!r} is not known; known: {', '.join(DRIVERS)}")
    return policies


def _file(item: str, machine: Machine, target: str, after: str) -> Change:
    before = machine.read(target)
    if before is None:
        raise _Cannot(f"cannot read {machine.shown(target)}")
    return Change(item, Kind.FILE, target, before, after)


def _governor(machine: Machine) -> list[Change]:
    changes = []
    for policy in _policies(machine):
        offered = (machine.read(f"{policy}/scaling_available_governors") or "").split()
        if "performance" not in offered:
            raise _Cannot(f"{machine.shown(policy)} offers {', '.join(offered) or 'no governor'}, not performance")
        preference = f"{policy}/energy_performance_preference"
        preferences = (machine.read(f"{policy}/energy_performance_available_preferences") or "").split()
        if "performance" in preferences and machine.read(f"{policy}/scaling_governor") != "performance":
            changes.append(_file("governor", machine, preference, "performance"))
        changes.append(_file("governor", machine, f"{policy}/scaling_governor", "performance"))
    return changes


def _frequency(machine: Machine, wanted: str) -> list[Change]:
    changes = []
    for policy in _policies(machine):
        khz = _wanted_khz(machine, policy, wanted)
        lowest, highest = (machine.read_number(f"{policy}/cpuinfo_{end}_freq") for end in ("min", "max"))
        if lowest is None or highest is None or not lowest <= khz <= highest:
            raise _Cannot(f"{khz // 1000} MHz does not lie within {lowest} to {highest} kHz, the range of the CPU")
        steps = [int(step) for step in (machine.read(f"{policy}/scaling_available_frequencies") or "").split()]
        if steps and khz not in steps:
            raise _Cannot(f"{khz // 1000} MHz is not offered; the CPU has {', '.join(str(s // 1000) for s in steps)}")
        low = _file("frequency", machine, f"{policy}/scaling_min_freq", str(khz))
        high = _file("frequency", machine, f"{policy}/scaling_max_freq", str(khz))
        upwards = khz > int(high.before or 0)
        changes += [high, low] if upwards else [low, high]
    return changes


def _wanted_khz(machine: Machine, policy: str, wanted: str) -> int:
    if wanted.isascii() and wanted.isdecimal() and int(wanted) > 0:
        return int(wanted) * 1000
    if wanted != "base":
        raise _Cannot(f"{wanted!r} is neither `base` nor a number of MHz")
    if (intel := machine.read_number(f"{policy}/base_frequency")) is not None:
        return intel
    cpu = (machine.read(f"{policy}/related_cpus") or machine.read(f"{policy}/affected_cpus") or "0").split()[0]
    if amd_mhz := machine.read_number(f"{CPU}/cpu{cpu}/acpi_cppc/nominal_freq"):
        return amd_mhz * 1000
    if steps := [int(step) for step in (machine.read(f"{policy}/scaling_available_frequencies") or "").split()]:
        return max(steps)  # acpi-cpufreq lists no turbo steps
    raise _Cannot("the kernel does not tell the base frequency; give a number of MHz")


def _no_turbo(machine: Machine) -> list[Change]:
    _known_cpu(machine)
    if machine.exists(NO_TURBO):
        return [_file("turbo", machine, NO_TURBO, "1")]
    if machine.exists(BOOST):
        return [_file("turbo", machine, BOOST, "0")]
    per_policy = [f"{policy}/boost" for policy in machine.policies if machine.exists(f"{policy}/boost")]
    if per_policy:
        return [_file("turbo", machine, name, "0") for name in per_policy]
    raise _Cannot("the kernel shows no switch for turbo")


def _c_states(machine: Machine) -> list[Change]:
    _known_cpu(machine)
    states = machine.idle_states
    if not states:
        raise _Cannot("the kernel shows no cpuidle, as in most virtual machines")
    deep = [state for state in states if state.exit_latency_us > DEEP_EXIT_LATENCY_US and not state.disabled]
    return [_file("c_states", machine, f"{state.folder}/disable", "1") for state in deep]


def _smt_off(machine: Machine) -> list[Change]:
    _known_cpu(machine)
    control = machine.read(SMT_CONTROL)
    if control not in ("on", "off"):
        raise _Cannot(f"the kernel's control of SMT says {control or 'nothing'}; only `on` can be switched off")
    return [_file("smt", machine, SMT_CONTROL, "off")]


def _gpu_uuid(gpus: Nvml, index: int) -> str:
    facts = gpus.facts(index)
    if facts is None:
        raise _Cannot(f"NVML shows no GPU {index}")
    return facts.uuid


def _persistence(gpus: Nvml, index: int) -> list[Change]:
    uuid, facts = _gpu_uuid(gpus, index), gpus.facts(index)
    if facts is None or facts.persistence is None:
        raise _Cannot(f"GPU {index} has no persistence mode")
    return [Change("gpu_persistence", Kind.PERSISTENCE, uuid, "on" if facts.persistence else "off", "on")]


def _gpu_clock(gpus: Nvml, index: int, mhz: int) -> list[Change]:
    uuid = _gpu_uuid(gpus, index)
    clocks = gpus.clocks_mhz(uuid)
    if mhz not in clocks:
        near = sorted(clocks, key=lambda clock: abs(clock - mhz))[:3]
        raise _Cannot(f"GPU {index} has no clock of {mhz} MHz; nearest: {', '.join(map(str, sorted(near))) or 'none'}")
    return [Change("gpu_clock", Kind.CLOCK, uuid, None, str(mhz))]
