"""Read the GPU's clocks, power, temperature and throttle reasons by NVML; None without NVML or such a reading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from suite.results.schema import GpuState

_PREFIXES = ("nvmlClocksEventReason", "nvmlClocksThrottleReason")
_NO_REASONS = ("None", "All", "GpuIdle")


def reason_names(mask: int) -> list[str]:
    """Return NVML's names of the clock-event reasons set in `mask`, but "GpuIdle"; an unknown bit as a number."""
    names: list[str] = []
    for bit, name in sorted(_reasons_by_bit().items()):
        if mask & bit:
            mask &= ~bit
            names.append(name)
    idle = pynvml.nvmlClocksThrottleReasonGpuIdle
    return names + [hex(1 << bit) for bit in range(64) if mask & ~idle & (1 << bit)]


def _reasons_by_bit() -> dict[int, str]:
    """Return reasons by their bit. Old and new names of one bit exist; the new prefix comes first and wins."""
    found: dict[int, str] = {}
    for prefix in _PREFIXES:
        for attribute, value in vars(pynvml).items():
            name = attribute.removeprefix(prefix)
            if attribute.startswith(prefix) and isinstance(value, int) and name not in _NO_REASONS:
                found.setdefault(value, name)
    return found


class GpuMonitor:
    """Read the state of one GPU, named by its UUID, so that `CUDA_VISIBLE_DEVICES` cannot make it another one."""

    def __init__(self, uuid: str) -> None:
        """Open the handle of the GPU in NVML.

        Raises:
            pynvml.NVMLError: there is no NVML, or it does not know this GPU.
        """
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def read(self) -> GpuState:
        """Return one reading, taking some tens of microseconds; a quantity that this GPU does not report is None."""
        milliwatts = self._ask(pynvml.nvmlDeviceGetPowerUsage)
        return GpuState(
            sm_clock_mhz=self._ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
            power_w=None if milliwatts is None else milliwatts / 1000.0,
            temperature_c=self._ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
            throttle_reasons=reason_names(self._ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons) or 0),
        )

    def _ask(self, query: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return query(self._handle, *arguments)
        except pynvml.NVMLError:
            return None


def gpu_reader(uuid: str | None) -> Callable[[], GpuState | None]:
    """Return a function that reads the state of the GPU of this UUID; it returns None without NVML or `uuid`."""
    if uuid is not None:
        try:
            return GpuMonitor(uuid).read
        except pynvml.NVMLError:
            pass
    return lambda: None
