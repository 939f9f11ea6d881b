"""Timers: for latency the device is waited for on both sides, for throughput never."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from optimizations.selection import timing


class Device:
    """Events on a stream that is through with `done` of them; `log` is what the host did, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.recorded = 0
        self.done = 0
        self.busy = True
        self.clock = 0.0
        self.stream = Stream(self)

    def event(self, enable_timing: bool = False) -> Any:
        return Event(self, enable_timing)


class Stream:
    """The current stream of device 3."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def query(self) -> bool:
        """Whether it is through with what the host has called, and with all events."""
        self.device.log.append("ask")
        return not self.device.busy and self.device.done >= self.device.recorded


class Event:
    def __init__(self, device: Device, timed: bool) -> None:
        self.device, self.timed, self.number, self.at = device, timed, 0, 0.0

    def record(self, stream: Stream) -> None:
        assert stream is self.device.stream
        self.device.recorded += 1
        self.number, self.at = self.device.recorded, self.device.clock
        self.device.log.append("record")

    def synchronize(self) -> None:
        assert self.number, "an event that was never recorded"
        self.device.done = max(self.device.done, self.number)
        self.device.clock += 1.0 if self.device.busy else 0.0  # a second's work was left
        self.device.busy = False
        self.device.log.append("wait")

    def query(self) -> bool:
        return self.device.done >= self.number

    def elapsed_time(self, other: Event) -> float:
        assert self.timed and other.timed
        return (other.at - self.at) * 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", {3: made.stream}.__getitem__)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: made.clock)
    return made


def call(device: Device) -> None:
    device.log.append("call")
    device.busy = True
    device.clock += 0.25


def test_latency_begins_with_an_idle_device_and_ends_with_one(device: Device) -> None:
    timer = timing.timer_for("latency", 3)
    timer.begin()
    call(device)
    measured = timer.end()
    assert device.log == ["ask", "record", "wait", "call", "record", "wait"]
    assert measured.seconds() == 1.25, "the call, and the device's work after it; not what was left from before"


def test_a_device_that_has_nothing_to_do_is_not_waited_for_before_a_call(device: Device) -> None:
    """What is timed would be the wait: it makes launches of kernels slower, and those of graphs hardly."""
    timer = timing.timer_for("latency", 3)
    device.busy = False
    for _ in range(2):
        device.log.clear()
        timer.begin()
        call(device)
        assert timer.end().seconds() == 1.25
        assert device.log == ["ask", "call", "record", "wait"]
    call(device)
    device.log.clear()
    timer.begin()
    assert device.log == ["ask", "record", "wait"], "the program launched something in between"


def test_throughput_waits_for_nothing_and_knows_when_the_device_is_through(device: Device) -> None:
    timer = timing.timer_for("throughput", 3)
    timer.begin()
    call(device)
    first = timer.end()
    timer.begin()  # the next call comes before the first one's time is known
    call(device)
    call(device)
    second = timer.end()
    assert device.log == ["record", "call", "record", "record", "call", "call", "record"]
    assert first.seconds() is None
    device.done = 2
    assert first.seconds() == 0.25
    assert second.seconds() is None
    device.done = 4
    assert second.seconds() == 0.5


@pytest.mark.parametrize("capturing", [False, True])
def test_nothing_is_timed_in_a_capture(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert timing.may_time() is not capturing


class Bindings:
    """`cuda.bindings.driver` of a thread that was in the strictest mode."""

    class CUstreamCaptureMode:
        CU_STREAM_CAPTURE_MODE_RELAXED = "relaxed"

    def __init__(self, device: Device) -> None:
        self.device = device
        self.mode = "global"

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[int, str]:
        before, self.mode = self.mode, mode
        self.device.log.append(mode)
        return 0, before


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_of_another_thread_or_stream_goes_on(
    device: Device, monkeypatch: pytest.MonkeyPatch, objective: Any, fails: bool
) -> None:
    """CUDA ends it where a thread in another mode asks about an event."""
    bindings = Bindings(device)
    monkeypatch.setattr(timing, "_driver", lambda: bindings)

    def asked(original: Any) -> Any:
        def ask(self: Any, *arguments: Any) -> Any:
            assert bindings.mode == "relaxed"
            if fails:
                raise RuntimeError("CUDA error")
            return original(self, *arguments)

        return ask

    for name in ("record", "synchronize", "query", "elapsed_time"):
        monkeypatch.setattr(Event, name, asked(getattr(Event, name)))
    monkeypatch.setattr(Stream, "query", asked(Stream.query))
    timer = timing.timer_for(objective, 3)
    with pytest.raises(RuntimeError, match="CUDA error") if fails else contextlib.nullcontext():
        timer.begin()
        assert bindings.mode == "global", "the program's own calls are in its own mode"
        measured = timer.end()
        device.done = 99
        assert measured.seconds() is not None
    assert bindings.mode == "global"
