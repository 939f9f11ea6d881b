"""What feeds cost the host in a call with nothing to refresh: the price of noticing that no attribute changed.

Needs no GPU: in such a call nothing is sent to the device, so the same work is done whatever the device is.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.fx

from optimizations.placement.feed_plan import Attribute, FeedPlan, HoistedGroup, TensorLayout
from optimizations.placement.feeds import Feeds
from optimizations.placement.sources import Guard


@dataclass(frozen=True, slots=True)
class FeedCost:
    """Host time of one `Feeds.bind` in the steady state, over `rounds` rounds of `calls` calls each.

    It is the calling thread's CPU time, so that other work on the machine does not count: nothing in here waits.
    `host_us` is the median round's time per call, `fastest_us` and `slowest_us` the spread. `bare_us` is the median
    of what is left without any guard: passing the arguments on.
    """

    scalars: int
    tensors: int
    kept: int
    host_us: float
    fastest_us: float
    slowest_us: float
    bare_us: float
    rounds: int
    calls: int


def measure_steady_feeds(
    *, scalars: int = 12, tensors: int = 1, kept: int = 100, rounds: int = 15, calls: int = 2000
) -> FeedCost:
    """Time the feeds of a graph with `scalars` attributes of rank 0, `tensors` larger ones, and `kept` other arguments.

    The defaults are a decoder with a NumPy scalar in every attention layer and a mask.
    """
    guarded = _times(_arguments(scalars, tensors, kept), rounds, calls)
    bare = _times(_arguments(0, 0, kept), rounds, calls)
    return FeedCost(
        scalars,
        tensors,
        kept,
        statistics.median(guarded),
        min(guarded),
        max(guarded),
        statistics.median(bare),
        rounds,
        calls,
    )


def _attributes(scalars: int, tensors: int) -> list[torch.Tensor]:
    return [torch.tensor(8.0 + i, dtype=torch.float64) for i in range(scalars)] + [
        torch.zeros(77, 77) for _ in range(tensors)
    ]


def _arguments(scalars: int, tensors: int, kept: int) -> tuple[torch.Tensor, ...]:
    """Attributes spread among the other arguments, as layers spread them."""
    arguments = [torch.zeros(4) for _ in range(kept)]
    attributes = _attributes(scalars, tensors)
    for number, attribute in enumerate(attributes):
        arguments.insert((number + 1) * len(arguments) // (len(attributes) + 1), attribute)
    return tuple(arguments)


def _feeds(arguments: tuple[torch.Tensor, ...]) -> Feeds:
    """Feeds of a graph that reads each attribute as it is. Arguments of rank 1 are the others."""
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("attribute"),))
    identity = torch.fx.GraphModule(torch.nn.Module(), graph)
    groups, others = [], []
    for index, argument in enumerate(arguments):
        if argument.dim() == 1:
            others.append(index)
            continue
        guard = Guard.VALUE if argument.dim() == 0 else Guard.VERSION
        layout = TensorLayout(tuple(argument.shape), tuple(argument.stride()), argument.dtype)
        groups.append(HoistedGroup(identity, (Attribute(guard, index, None),), (layout,)))
    return Feeds(
        FeedPlan(
            device=torch.device("cpu"),
            kept=tuple(others),
            hoisted=tuple(groups),
            staged=(),
            staged_layouts=(),
            cpu_outputs=(),
            keep_addresses=True,
        )
    )


def _times(arguments: tuple[torch.Tensor, ...], rounds: int, calls: int) -> list[float]:
    """Microseconds per call of each round."""
    feeds = _feeds(arguments)
    feeds.bind(arguments)
    times = []
    for _ in range(rounds):
        start = time.thread_time_ns()
        for _ in range(calls):
            feeds.bind(arguments)
        times.append((time.thread_time_ns() - start) / calls / 1000)
    return times
