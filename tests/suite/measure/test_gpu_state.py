"""NVML's readings, and values that NVML does not report."""

from __future__ import annotations

import pynvml
import pytest
from fixtures.fake_nvml import FakeNvml, nvml

from suite.measure.gpu import gpu_reader, reason_names
from suite.results.schema import GpuState

__all__ = ["nvml"]


def test_reasons_have_nvmls_names_and_idle_is_none() -> None:
    mask = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    assert reason_names(mask) == ["SwPowerCap", "HwThermalSlowdown"]
    assert reason_names(mask | pynvml.nvmlClocksEventReasonGpuIdle) == ["SwPowerCap", "HwThermalSlowdown"]
    assert reason_names(0) == []


READ = GpuState(
    sm_clock_mhz=1980, memory_clock_mhz=3201, power_w=412.5, temperature_c=51, throttle_reasons=["SwPowerCap"]
)


def test_reading_has_the_units_of_its_fields(nvml: FakeNvml) -> None:
    assert gpu_reader("GPU-first")() == READ


def test_values_the_gpu_does_not_report_are_none(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    for query in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksEventReasons"):
        monkeypatch.setattr(pynvml, query, nvml.not_supported)
    missing = {"power_w": None, "temperature_c": None, "throttle_reasons": []}
    assert gpu_reader("GPU-first")() == READ.model_copy(update=missing)


def test_without_nvml_or_this_gpu_nothing_is_read(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_reader("GPU-third")() is gpu_reader(None)() is None
    monkeypatch.setattr(pynvml, "nvmlInit", nvml.not_supported)
    assert gpu_reader("GPU-first")() is None
