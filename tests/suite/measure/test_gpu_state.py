"""NVML's readings, and values that NVML does not report."""

from __future__ import annotations

import pynvml
import pytest

from suite.measure.gpu import gpu_reader, reason_names


def test_reasons_have_nvmls_names_and_idle_is_none():
    mask = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    assert reason_names(mask) == ["SwPowerCap", "HwThermalSlowdown"]
    assert reason_names(mask | pynvml.nvmlClocksEventReasonGpuIdle) == ["SwPowerCap", "HwThermalSlowdown"]
    assert reason_names(0) == []


@pytest.fixture
def nvml(monkeypatch):
    """A GPU that reports everything; the dict maps queries to answers, and may be changed."""
    answers = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetPowerUsage": 412_500,
        "nvmlDeviceGetTemperature": 51,
        "nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonSwPowerCap,
    }
    clocks = {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}
    for name in answers:

        def query(*arguments, name=name):
            if isinstance(answers[name], Exception):
                raise answers[name]
            return answers[name]

        monkeypatch.setattr(pynvml, name, query)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda handle, kind: clocks[kind])
    return answers


def test_reading_has_the_units_of_its_fields(nvml):
    state = gpu_reader("GPU-1234")()
    assert state is not None
    assert (state.sm_clock_mhz, state.memory_clock_mhz) == (1980, 3201)
    assert (state.power_w, state.temperature_c, state.throttle_reasons) == (412.5, 51, ["SwPowerCap"])


def test_values_the_gpu_does_not_report_are_none(nvml):
    for query in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksEventReasons"):
        nvml[query] = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    state = gpu_reader("GPU-1234")()
    assert state is not None
    assert (state.power_w, state.temperature_c, state.throttle_reasons) == (None, None, [])
    assert state.sm_clock_mhz == 1980


@pytest.mark.parametrize("query", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_without_nvml_or_without_this_gpu_there_is_no_reading(nvml, query):
    nvml[query] = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert gpu_reader("GPU-1234")() is None
    assert gpu_reader(None)() is None
