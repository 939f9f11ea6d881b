"""Find the fastest of several alternatives to run a function, on the program's own calls.

1. Each alternative runs `CALLS` consecutive calls, after one call that does not count: it uploads a graph, or loads
   kernels.
2. A pair of CUDA events surrounds each call, or the part of it that differs. Nothing waits for them; they are read
   once they have completed.
3. The first alternative is kept unless the median of another is smaller by more than `LEAST_GAIN`, and the times of
   the two hardly overlap: three quarters of the other's are below three quarters of the first one's. Otherwise a race
   between equal alternatives would choose the second by chance if calls are short.

A race makes no call that the program did not make. It must not be used for a function with collectives: the time of a
collective depends on other processes, which could choose another alternative.

Note [Captures elsewhere]. Querying an event ends a capture that another thread has begun in CUDA's global mode, unless
the querying thread is in relaxed mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, TypeVar

import torch

from optimizations.graph.driver import check

CALLS = 8
"""Calls of each alternative that count."""

FEWEST_TIMES = 5
"""An alternative with fewer times than that cannot win: some of its calls did not run by it."""

LEAST_GAIN = 0.03
"""How much faster than the first alternative another must be, as a share of the first one's time."""

Result = TypeVar("Result")

Events = tuple[Any, Any]
"""Events that measure time, on the stream of a call: before it and after it."""


class Race:
    """Choose the fastest alternative for the program's calls, as the module describes.

    Args:
        alternatives: names; the first one is kept unless another is clearly faster.

    Attributes:
        winner: the chosen alternative; None while the race runs.
        median_us: median time by alternative, once there is a winner.
    """

    def __init__(self, alternatives: Sequence[str]) -> None:
        if len(set(alternatives)) != len(alternatives) or not alternatives:
            raise ValueError(f"a race needs different alternatives, at least one; these are {list(alternatives)}")
        self._alternatives = tuple(alternatives)
        self._calls = 0
        self._pairs: list[tuple[str, Any, Any]] = []
        self.winner: str | None = None
        self.median_us: dict[str, float] = {}

    @property
    def next_alternative(self) -> str:
        """Return the alternative that runs the next call."""
        index = self._calls // (CALLS + 1)
        return self._alternatives[index] if index < len(self._alternatives) else self._alternatives[0]

    def run(self, call: Callable[[str], tuple[Result, Events | None]]) -> Result:
        """Run one call of the program by `call(alternative)`.

        It returns the call's result and the events around it; None in place of these if the call does not count.
        """
        alternative, place = self.next_alternative, self._calls % (CALLS + 1)
        if self._calls >= len(self._alternatives) * (CALLS + 1):
            self._judge()
            return call(self.winner or alternative)[0]
        self._calls += 1
        result, events = call(alternative)
        if events is not None and place > 0:
            self._pairs.append((alternative, *events))
        return result

    def _judge(self) -> None:
        """Choose the winner if all events have completed. Several threads may call this at the same time."""
        if self.winner is not None:
            return
        with _relaxed_capture_mode():
            if not all(end.query() for _, _, end in self._pairs):
                return
            times: dict[str, list[float]] = {name: [] for name in self._alternatives}
            for name, start, end in self._pairs:
                times[name].append(1e3 * start.elapsed_time(end))
        times = {name: sorted(found) for name, found in times.items() if len(found) >= FEWEST_TIMES}
        self.median_us = {name: median(found) for name, found in times.items()}
        first = self._alternatives[0]
        fastest = min(self.median_us, key=lambda name: self.median_us[name], default=first)
        self.winner = fastest if first in times and _is_faster(times[fastest], times[first]) else first


def _is_faster(times: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether sorted times are clearly shorter than sorted others."""
    quarter, other_quarter = len(times) // 4, len(others) // 4
    return median(times) < (1 - LEAST_GAIN) * median(others) and times[-1 - quarter] < others[other_quarter]


def mark(device_index: int) -> torch.cuda.Event:
    """Record an event on the current stream of a device."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device_index))
    return event


@contextlib.contextmanager
def _relaxed_capture_mode() -> Iterator[None]:
    """Set the relaxed capture mode during the block. Note [Captures elsewhere]."""
    if not torch.cuda.is_initialized():
        yield
        return
    from cuda.bindings import driver

    before = check(driver.cuThreadExchangeStreamCaptureMode, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode, before)
