"""Timing a call of the program on the device it runs on. Thin: events and a clock.

Nothing here waits inside a capture of the user's: who asks for times asks `may_time` first. Events are waited for, and
not streams, because PyTorch's debug mode for synchronisation, which the user may have on, counts the latter.

Note [Captures elsewhere]. A capture on another stream of this thread, or in another thread, is ended by a call that
CUDA holds for unsafe in its mode, and asking or waiting for an event is one. In the relaxed mode of this thread it is
not: neither event is of a stream that is captured.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch

from optimizations import torch_internals
from optimizations.captured.driver import check

Objective = Literal["latency", "throughput"]


class Timing(Protocol):
    """A call that was timed."""

    def seconds(self) -> float | None:
        """How long it took; None while the device is not through with it."""


class Timer(Protocol):
    """Times one call at a time; used from one thread."""

    def begin(self) -> None:
        """To be called right before the call."""

    def end(self) -> Timing:
        """To be called right after it."""


class _Known:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return self._seconds


class LatencyTimer:
    """Host time from the call to completion on the device, which begins with nothing under way."""

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index
        self._event = torch.cuda.Event()
        self._started = 0.0

    def begin(self) -> None:
        self._wait()
        self._started = time.perf_counter()

    def end(self) -> Timing:
        self._wait()
        return _Known(time.perf_counter() - self._started)

    def _wait(self) -> None:
        with _leaving_captures_alone():
            self._event.record(torch.cuda.current_stream(self._device_index))
            self._event.synchronize()


class _BetweenEvents:
    def __init__(self, first: torch.cuda.Event, last: torch.cuda.Event) -> None:
        self._first = first
        self._last = last

    def seconds(self) -> float | None:
        with _leaving_captures_alone():
            return float(self._first.elapsed_time(self._last)) * 1e-3 if self._last.query() else None


class ThroughputTimer:
    """Time on the device from where its stream comes to the call to where it leaves it; nobody waits.

    While the host is ahead that is the work of the device, and otherwise the time the host takes.
    """

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index
        self._first: torch.cuda.Event | None = None

    def begin(self) -> None:
        self._first = self._recorded()

    def end(self) -> Timing:
        assert self._first is not None, "`begin` comes first"
        return _BetweenEvents(self._first, self._recorded())

    def _recorded(self) -> torch.cuda.Event:
        with _leaving_captures_alone():
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device_index))
            return event


def timer_for(objective: Objective, device_index: int) -> Timer:
    """The timer of an objective. Which device is current when it is used does not matter."""
    return LatencyTimer(device_index) if objective == "latency" else ThroughputTimer(device_index)


def may_time() -> bool:
    """Whether a call may be timed here and now: not inside a capture of the user's."""
    return not torch.cuda.is_current_stream_capturing()


def is_profiled() -> bool:
    """Whether the program looks at itself: its calls take longer then, by how many kernels they launch, and what it is
    shown is to be what it does at other times."""
    return bool(torch_internals.autograd_profiler._is_profiler_enabled)


@contextlib.contextmanager
def _leaving_captures_alone() -> Iterator[None]:
    """Note [Captures elsewhere]."""
    driver = _driver()
    if driver is None:
        yield
        return
    before = check(driver.cuThreadExchangeStreamCaptureMode, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode, before)


def _driver() -> Any:
    """The bindings; None where they are not installed or there is no GPU."""
    if not torch.cuda.is_initialized():
        return None
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver
