"""Identify the GPU a run uses by NVML, and read whether its clocks are lowered, without a CUDA context or torch.

A run uses one GPU, the first one visible to CUDA. CUDA numbers GPUs by speed by default, NVML by bus; so the runner
starts workers with CUDA_DEVICE_ORDER=PCI_BUS_ID, and both use the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pynvml

from suite.results.errors import WrongUse
from suite.results.schema import THROTTLING, GpuInfo, GpuState

_INSTEAD = (
    "Without one: `encore explain --set all` analyses the workloads' capture obstacles, and `encore run --device cpu "
    "--size tiny` tries the machinery in small."
)


class NoGpu(WrongUse):
    """Report that no NVIDIA GPU can be used; the message has the reason and advice."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Hold the GPU a run uses, the driver's version, and how many GPUs the machine has."""

    info: GpuInfo
    driver: str
    count: int


def find_gpu() -> Gpu:
    """Return the GPU that CUDA shows first.

    Raises:
        NoGpu: there is no driver, no GPU, or none visible.
    """
    with device() as handle:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        info = GpuInfo(
            name=pynvml.nvmlDeviceGetName(handle),
            compute_capability=f"{major}.{minor}",
            memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        )
        return Gpu(info, pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetCount())


@contextmanager
def device() -> Iterator[Any]:
    """Yield NVML's handle of the GPU that CUDA shows first, while NVML is open.

    Raises:
        NoGpu: there is no driver, no GPU, or none visible.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpu(f"no NVIDIA GPU: the driver does not answer ({error}). {_INSTEAD}") from error
    try:
        yield _handle()
    finally:
        pynvml.nvmlShutdown()


def visible_gpus() -> list[str]:
    """Return the GPUs that a process may use, each as `CUDA_VISIBLE_DEVICES` names it, in CUDA's order.

    Raises:
        NoGpu: there is none.
    """
    with device():
        count = pynvml.nvmlDeviceGetCount()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(count)] if named is None else [one.strip() for one in named.split(",")]


def _handle() -> Any:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if not first or first == "-1":
        raise NoGpu(f"no NVIDIA GPU: CUDA_VISIBLE_DEVICES hides them all. {_INSTEAD}")
    try:
        if first.isdigit():
            return pynvml.nvmlDeviceGetHandleByIndex(int(first))
        return pynvml.nvmlDeviceGetHandleByUUID(first)
    except pynvml.NVMLError as error:
        raise NoGpu(f"no NVIDIA GPU: there is no device {first!r} ({error}). {_INSTEAD}") from error


def gpu_reader(uuid: str | None) -> Callable[[], GpuState | None]:
    """Return a function that reads why the GPU of this UUID has lowered its clocks.

    It takes some microseconds. Without NVML or `uuid` there is no reading, and no reason where the GPU reports none.
    """
    if uuid is None:
        return lambda: None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return lambda: None

    def read() -> GpuState:
        mask = 0
        with suppress(pynvml.NVMLError):
            mask = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        bits = {name: getattr(pynvml, f"nvmlClocksEventReason{name}") for name in THROTTLING}
        return GpuState(throttle_reasons=[name for name, bit in bits.items() if mask & bit])

    return read
