"""Access the GPU by NVML: what `check` reads of it, and the two settings `tune` changes. Thin: no decisions here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pynvml

from host_tuning.errors import HostTuningError

_HARMLESS = ("None", "All", "GpuIdle", "ApplicationsClocksSetting", "UserDefinedClocks", "DisplayClockSetting")
"""Reasons for a clock below the maximum that are no disturbance: nothing to do, or a clock that a user chose."""
_REASON_PREFIXES = ("nvmlClocksEventReason", "nvmlClocksThrottleReason")


class GpuError(HostTuningError):
    """Report that NVML is not available, does not list the GPU, or failed."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Describe one GPU as NVML describes it; None where it does not tell. `pci` is the address as sysfs writes it.

    `other_processes` counts processes that use the GPU for computing, this one left out; `throttling` names why the
    clock is lower than it could be, idleness and chosen clocks left out.
    """

    uuid: str
    name: str
    pci: str
    sm_clock_mhz: int | None
    highest_sm_clock_mhz: int | None
    persistence: bool | None
    throttling: tuple[str, ...]
    other_processes: int | None


class Nvml:
    """Access the GPUs of this machine; tests have a class like it without a GPU."""

    def facts(self, index: int = 0) -> GpuFacts | None:
        """Return the GPU with this number in the order of the bus; None where there is no NVML or no such GPU."""
        try:
            with _nvml():
                return _facts(pynvml.nvmlDeviceGetHandleByIndex(index))
        except (GpuError, pynvml.NVMLError):
            return None

    def clocks_mhz(self, uuid: str) -> tuple[int, ...]:
        """Return the graphics clocks that can be locked in MHz, lowest first. Raises GpuError, as all below."""

        def ask(handle: Any) -> set[int]:
            found: set[int] = set()
            for memory_clock in pynvml.nvmlDeviceGetSupportedMemoryClocks(handle):
                found.update(pynvml.nvmlDeviceGetSupportedGraphicsClocks(handle, memory_clock))
            return found

        return tuple(sorted(self._do(uuid, "ask for its clocks", ask)))

    def set_persistence(self, uuid: str, on: bool) -> None:
        """Set the persistence mode."""
        state = pynvml.NVML_FEATURE_ENABLED if on else pynvml.NVML_FEATURE_DISABLED
        self._do(uuid, "set persistence mode", lambda handle: pynvml.nvmlDeviceSetPersistenceMode(handle, state))

    def lock_clock(self, uuid: str, mhz: int) -> None:
        """Lock the graphics clock at one frequency."""
        self._do(uuid, "lock its clock", lambda handle: pynvml.nvmlDeviceSetGpuLockedClocks(handle, mhz, mhz))

    def unlock_clock(self, uuid: str) -> None:
        """Let the driver choose the graphics clock again."""
        self._do(uuid, "unlock its clock", pynvml.nvmlDeviceResetGpuLockedClocks)

    def _do(self, uuid: str, what: str, call: Callable[[Any], Any]) -> Any:
        with _nvml():
            try:
                return call(pynvml.nvmlDeviceGetHandleByUUID(uuid))
            except pynvml.NVMLError as error:
                raise GpuError(f"GPU {uuid}: cannot {what}: {error}") from error


@contextmanager
def _nvml() -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise GpuError(f"the NVIDIA driver does not answer: {error}") from error
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _facts(handle: Any) -> GpuFacts:
    mask = _ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    persistence = _ask(pynvml.nvmlDeviceGetPersistenceMode, handle)
    processes = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return GpuFacts(
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        pci=_sysfs_address(_text(pynvml.nvmlDeviceGetPciInfo(handle).busId)),
        sm_clock_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        highest_sm_clock_mhz=_ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        persistence=None if persistence is None else bool(persistence),
        throttling=throttle_names(mask),
        other_processes=None if processes is None else sum(1 for each in processes if each.pid != os.getpid()),
    )


def throttle_names(mask: int) -> tuple[str, ...]:
    """Return NVML's names of the reasons in a mask that are a disturbance."""
    names: dict[int, str] = {}
    for prefix in _REASON_PREFIXES:
        for attribute, bit in vars(pynvml).items():
            if attribute.startswith(prefix) and isinstance(bit, int):
                names.setdefault(bit, attribute.removeprefix(prefix))
    return tuple(name for bit, name in sorted(names.items()) if bit & mask == bit != 0 and name not in _HARMLESS)


def _ask(query: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def _sysfs_address(bus_id: str) -> str:
    """Return an address as sysfs writes it. NVML writes the PCI domain with eight digits, sysfs with four."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
