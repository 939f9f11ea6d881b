"""Time several ways to do the same, side by side.

A host that is shared is twice as slow in some seconds as in others. Ways that were timed one after the other would
differ by that. So each has a turn of a few iterations, and all have as many turns.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from suite.measure.launches import HostParts, host_parts, waited_us

TURN = 10
"""Iterations of one way, after which the next one has its turn."""

WARM_UP = 8
"""Iterations of each before the first turn: it finds what others have made since it was made, other gradients, say."""


@dataclass(frozen=True, slots=True)
class Times:
    """Hold microseconds of one way: each sample until the device is done, and medians over its turns of the host's.

    `host` and `host_at_work` are as in `host_parts`, None where no graph is launched.
    """

    whole_us: list[float]
    host: HostParts | None
    host_at_work: HostParts | None


def timed_us(call: Callable[[int], Any], wait: Callable[[], None], samples: int) -> list[float]:
    """Return microseconds from each of so many calls until the device is done."""
    return [waited_us(functools.partial(call, index), wait) for index in range(samples)]


def times_in_turns(
    calls: Sequence[Callable[[int], Any]], wait: Callable[[], None], samples: int, *, turn: int = TURN
) -> list[Times]:
    """Take so many samples of each of these, `turn` at a time. Each round begins with another one.

    Args:
        calls: each runs the iteration with this number.
        wait: until the device is done.
    """
    for call in calls:
        for index in range(WARM_UP):
            call(index)
    whole_us: list[list[float]] = [[] for _ in calls]
    parts: list[list[tuple[HostParts | None, HostParts | None]]] = [[] for _ in calls]
    for number, start in enumerate(range(0, samples, turn)):
        taken = min(samples - start, turn)
        for place in range(len(calls)):
            which = (place + number) % len(calls)
            call = calls[which]
            call(0)  # the first after others finds other caches
            whole_us[which] += timed_us(call, wait, taken)
            parts[which].append((host_parts(call, wait, taken), host_parts(call, wait, taken, at_work=True)))
    return [
        Times(whole, _median([waiting for waiting, _ in both]), _median([at_work for _, at_work in both]))
        for whole, both in zip(whole_us, parts, strict=True)
    ]


def _median(found: Sequence[HostParts | None]) -> HostParts | None:
    """Return the median of each part over turns."""
    there = [one for one in found if one is not None]
    if not there:
        return None
    return HostParts(
        **{name: statistics.median(getattr(one, name) for one in there) for name in HostParts.model_fields}
    )
