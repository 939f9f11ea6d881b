"""Time blocks of samples: host time to completion and device time of single iterations.

All samples are stored. Inputs rotate over sets at different addresses, because constant addresses would hide the cost
of passing moving inputs to a CUDA graph.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from models.instance import tensors_of
from models.registry import Inputs
from suite.measure.iteration import Iterate
from suite.results.schema import Block, GpuState


class DeviceTimer:
    """Synchronize with a device and measure its time. This one is a CPU's: calls are synchronous, and host time is all.

    `elapsed_us` returns microseconds of device time from `start` to `stop`, after `synchronize`; None without a device.
    `before_start` is called at the beginning of each `start`: ranks start together.
    """

    before_start: Callable[[], None] = staticmethod(lambda: None)

    def synchronize(self) -> None:
        return

    def start(self) -> None:
        self.before_start()

    def stop(self) -> None:
        return

    def elapsed_us(self) -> float | None:
        return None


class CudaTimer(DeviceTimer):
    """Time by two CUDA events on the current stream, including time in which the device is idle."""

    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._stop = torch.cuda.Event(enable_timing=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def start(self) -> None:
        self.before_start()
        self._start.record()

    def stop(self) -> None:
        self._stop.record()

    def elapsed_us(self) -> float | None:
        return self._start.elapsed_time(self._stop) * 1000.0


def timer_for(device: torch.device) -> DeviceTimer:
    return CudaTimer() if device.type == "cuda" else DeviceTimer()


def require_distinct_addresses(input_sets: Sequence[Inputs]) -> None:
    """Check that no tensor of one set has the address of its counterpart in another.

    Raises:
        ValueError: two sets share a tensor's memory, so rotating them would not move that input.
    """
    tensors = (tensors_of((inputs.args, inputs.kwargs)) for inputs in input_sets)
    addresses = [[tensor.data_ptr() for tensor in own if tensor.numel()] for own in tensors]
    for position, column in enumerate(zip(*addresses, strict=True)):
        if len(set(column)) != len(column):
            raise ValueError(
                f"input tensor {position} has the same address in several of the {len(column)} input sets; "
                "each call of a workload's input function must make new tensors"
            )


def measure_block(
    iterate: Iterate,
    input_sets: Sequence[Inputs],
    timer: DeviceTimer,
    *,
    index: int,
    turn: int,
    samples: int,
    read_gpu: Callable[[], GpuState | None],
    lead_in: int = 0,
    process: int = 0,
    core: int | None = None,
) -> Block:
    """Time `samples` iterations one by one.

    `lead_in` iterations precede them, which are synchronized like the samples and not stored. With `core` the calling
    thread is bound to that logical core for the block; other threads are not.

    Sample i of block `index` runs on input set (index * samples + i) modulo the number of sets. Host time runs from
    before the call until the device has finished, and contains the recording of one event (about 1 us). The GPU's
    state is read outside of all timed parts.
    """

    def rotation(position: int) -> int:
        return (index * samples + position) % len(input_sets)

    with bound_to(core) as bound:
        gpu_before = read_gpu()
        gc.collect()
        host_us, device_us = _single_iterations(iterate, input_sets, timer, rotation, range(-lead_in, samples))
        gpu_after = read_gpu()
    return Block(
        process=process,
        core=core if bound else None,
        index=index,
        turn=turn,
        host_us=host_us[lead_in:],
        device_us=device_us[lead_in:] or None,
        input_sets=[rotation(position) for position in range(samples)],
        gpu_before=gpu_before,
        gpu_after=gpu_after,
    )


def _single_iterations(
    iterate: Iterate,
    input_sets: Sequence[Inputs],
    timer: DeviceTimer,
    rotation: Callable[[int], int],
    positions: Iterable[int],
) -> tuple[list[float], list[float]]:
    """Return host and device times of these iterations, with a synchronization after each."""
    host_us: list[float] = []
    device_us: list[float] = []
    for position in positions:
        inputs = input_sets[rotation(position)]
        timer.synchronize()
        timer.start()
        begin_ns = time.perf_counter_ns()
        iterate(inputs)
        timer.stop()
        timer.synchronize()
        host_us.append((time.perf_counter_ns() - begin_ns) / 1000.0)
        if (elapsed_us := timer.elapsed_us()) is not None:
            device_us.append(elapsed_us)

    return host_us, device_us


@contextlib.contextmanager
def bound_to(core: int | None) -> Iterator[bool]:
    """Bind the calling thread to a logical core. Yield whether that was permitted."""
    if core is None:
        yield False
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {core})
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setaffinity(0, before)


def iteration_us(iterate: Iterate, input_sets: Sequence[Inputs], timer: DeviceTimer, iterations: int = 5) -> float:
    """Return the median host time of a few iterations, from which the length of blocks is planned."""
    times, _ = _single_iterations(
        iterate, input_sets, timer, lambda position: position % len(input_sets), range(iterations)
    )
    return statistics.median(times)
