"""Timing a call of the program on the device it runs on. Thin: events and a clock.

Nothing here waits inside a capture of the user's: who asks for times asks `may_time` first. Events are waited for, and
not streams, because PyTorch's debug mode for synchronisation, which the user may have on, counts the latter.

Note [Captures elsewhere]. A capture on another stream of this thread, or in another thread, is ended by a call that
CUDA holds for unsafe in its mode, and asking or waiting for an event is one. In the relaxed mode of this thread it is
not: neither event is of a stream that is captured.

Note [Waits before]. A device that has nothing to do is not waited for again. On an H200 an event that was recorded and
waited for right before a function made it 12 us longer if it launches kernels, and 2 us if it launches a graph (32 and
38 us without): what is timed would be the wait. Calls that are timed follow one another, each awaited at its end, so
mostly there is nothing to wait for.
"""

from __future__ import annotations

import sys
import time
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
    """Host time from the call to completion on the device, whose stream begins with nothing under way."""

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index
        self._event = torch.cuda.Event()
        self._leaving_captures_alone = _LeavingCapturesAlone()
        self._started = 0.0

    def begin(self) -> None:
        with self._leaving_captures_alone:
            stream = torch.cuda.current_stream(self._device_index)
            if not stream.query():  # Note [Waits before]
                self._wait_for(stream)
        self._started = time.perf_counter()

    def end(self) -> Timing:
        with self._leaving_captures_alone:
            self._wait_for(torch.cuda.current_stream(self._device_index))
            return _Known(time.perf_counter() - self._started)

    def _wait_for(self, stream: Any) -> None:
        self._event.record(stream)
        self._event.synchronize()


class _BetweenEvents:
    def __init__(self, first: torch.cuda.Event, last: torch.cuda.Event, alone: _LeavingCapturesAlone) -> None:
        self._first = first
        self._last = last
        self._leaving_captures_alone = alone

    def seconds(self) -> float | None:
        with self._leaving_captures_alone:
            return float(self._first.elapsed_time(self._last)) * 1e-3 if self._last.query() else None


class ThroughputTimer:
    """Time on the device from where its stream comes to the call to where it leaves it; nobody waits.

    While the host is ahead that is the work of the device, and otherwise the time the host takes.
    """

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index
        self._leaving_captures_alone = _LeavingCapturesAlone()
        self._first: torch.cuda.Event | None = None

    def begin(self) -> None:
        self._first = self._recorded()

    def end(self) -> Timing:
        assert self._first is not None, "`begin` comes first"
        return _BetweenEvents(self._first, self._recorded(), self._leaving_captures_alone)

    def _recorded(self) -> torch.cuda.Event:
        with self._leaving_captures_alone:
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


def is_traced() -> bool:
    """Whether something follows what Python does in this thread: a debugger, a measurement of coverage, a profiler.

    What runs more lines of Python takes longer by more, and not so where nothing follows.
    """
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return True
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    if monitoring is None:
        return False
    tools = (monitoring.DEBUGGER_ID, monitoring.COVERAGE_ID, monitoring.PROFILER_ID)
    return any(monitoring.get_tool(tool) is not None for tool in tools)


class _LeavingCapturesAlone:
    """Note [Captures elsewhere]. Made once: entering it is in what is timed."""

    def __init__(self) -> None:
        self._driver = _driver()
        self._before: Any = None

    def __enter__(self) -> None:
        if self._driver is not None:
            relaxed = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            self._before = check(self._driver.cuThreadExchangeStreamCaptureMode, relaxed)

    def __exit__(self, *error: object) -> None:
        if self._driver is not None:
            check(self._driver.cuThreadExchangeStreamCaptureMode, self._before)


def _driver() -> Any:
    """The bindings; None where they are not installed or there is no GPU."""
    if not torch.cuda.is_initialized():
        return None
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver
