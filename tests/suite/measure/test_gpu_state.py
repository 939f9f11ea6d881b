"""NVML's reasons for lower clocks."""

from __future__ import annotations

import pynvml
import pytest
from fixtures.fake_nvml import FakeNvml, nvml

from suite.measure.gpu import gpu_reader
from suite.results.schema import GpuState

__all__ = ["nvml"]


def test_reading_names_reasons_that_lower_clocks(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_reader("GPU-first")() == GpuState(throttle_reasons=["SwPowerCap"])
    mask = pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonGpuIdle
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: mask)
    assert gpu_reader("GPU-first")() == GpuState(throttle_reasons=["HwThermalSlowdown"])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", nvml.not_supported)
    assert gpu_reader("GPU-first")() == GpuState(throttle_reasons=[])


def test_without_nvml_or_this_gpu_nothing_is_read(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_reader("GPU-third")() is gpu_reader(None)() is None
    monkeypatch.setattr(pynvml, "nvmlInit", nvml.not_supported)
    assert gpu_reader("GPU-first")() is None
