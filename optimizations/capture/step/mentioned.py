"""Find the earlier tensors that a captured graph reads, by observed operators and by the parameters of its nodes.

Operators are observed, compiled code is not: the addresses that it reads are parameters of the graph's nodes. Every
parameter that could be an address is treated as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from optimizations.capture.device import Device
from optimizations.capture.step.call import Call
from optimizations.capture.step.gradients import Use, memory
from optimizations.capture.step.launches import Launches
from optimizations.capture.step.observer import Observer, storage
from optimizations.graph.driver import CudaCallFailed
from optimizations.graph.memory import MemoryRanges, size_bytes
from optimizations.graph.records import MemoryRange


def uses_of(
    device: Device,
    graph: Any,
    observer: Observer,
    launches: Launches,
    before: Sequence[torch.Tensor | None],
    after: Sequence[torch.Tensor | None],
    writes: Callable[[torch.Tensor], bool],
) -> list[Use]:
    """Return how a call used each gradient that it found. Note [Gradients before and after] in `gradients`.

    `writes`: whether the call wrote a gradient that is still there. A gradient whose address may be a parameter of a
    node of unknown origin counts as needed.
    """
    found = []
    for old, new in zip(before, after, strict=True):
        if old is None:
            found.append(Use.ABSENT)
        elif size_bytes(old) and storage(old) in observer.outside:
            found.append(Use.NEEDED)
        elif new is not old:
            found.append(Use.DROPPED)
        else:
            found.append(Use.NEEDED if writes(old) else Use.LEFT_ALONE)
    for unread in (Use.DROPPED, Use.LEFT_ALONE):
        ranges = memory(old for old, use in zip(before, found, strict=True) if use is unread)
        if device.mentions(graph, ranges) and not _only_left_over(device, graph, launches, ranges):
            found = [Use.NEEDED if use is unread else use for use in found]
    return found


def _only_left_over(device: Device, graph: Any, launches: Launches, ranges: Sequence[MemoryRange]) -> bool:
    """Return whether only leftover words in kernels of operators point into these ranges.

    Note [What an operator was given] in `launches`.
    """
    if launches.unknown is not None:
        return False
    places = MemoryRanges(ranges)
    try:
        captured = device.read(graph)
    except CudaCallFailed:
        return False
    return not any(word in places for word in chain(launches.read, launches.conclusive_words(captured)))


def reads_of(device: Device, graph: Any, observer: Observer, call: Call) -> Callable[[torch.Tensor], bool]:
    """Return a predicate for the tensors that the step reads, by an operator or by a kernel of compiled code."""
    unseen = [t for t in call.state.tensors.values() if device.holds(t) and storage(t) not in observer.outside]
    in_compiled_code = call.state.compiled and device.mentions(graph, memory(unseen))
    return lambda tensor: in_compiled_code or storage(tensor) in observer.outside
