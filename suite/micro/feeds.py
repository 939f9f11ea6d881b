"""Measure host time of placement's feeds in a call with nothing to refresh, over numbers of guarded attributes.

Measured without a GPU: in such a call nothing is sent to the device, so the work is the same whatever the device is.

What feeds cost the host in a call with nothing to refresh: the price of noticing that no attribute changed.

Needs no GPU: in such a call nothing is sent to the device, so the same work is done whatever the device is. With the
"meta" device in the GPU's place, sending costs what it costs the host: a transfer does nothing there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.fx
from rich.table import Table

from optimizations.byte_units import format_bytes
from optimizations.placement.feed_plan import Attribute, FeedPlan, HoistedGroup, Source, Staged, TensorLayout
from optimizations.placement.feeds import Feeds
from optimizations.placement.sources import Guard
from suite.results.schema import Environment, Record

SCALARS = (0, 1, 6, 12, 24)
"""Attributes of rank 0. Six and twelve are those of ST's encoder and decoder graphs."""
TENSORS = (0, 1)
"""Larger attributes, such as a mask."""
TENSOR_BYTES = (4 * 2**10, 16 * 2**10, 64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20)
"""One larger attribute of these sizes: up to some of them comparing costs less than sending."""


class FeedRun(Record):
    """Hold `feeds.json`: the machine, and a cost for each point."""

    micro_schema_version: int
    environment: Environment
    costs: list[FeedCost]


def measure() -> Iterator[FeedCost]:
    """Yield a cost for each point, as it is measured."""
    for tensors in TENSORS:
        for scalars in SCALARS:
            yield measure_steady_feeds(scalars=scalars, tensors=tensors)
    for tensor_bytes in TENSOR_BYTES:
        calls = min(2000, 2**27 // tensor_bytes)
        yield measure_steady_feeds(scalars=0, tensors=1, tensor_bytes=tensor_bytes, calls=calls)


def table(run: FeedRun) -> Table:
    """Return the costs as a table for a terminal."""
    shown = Table(
        "scalars",
        "tensors",
        "each",
        "other arguments",
        "µs per call",
        "fastest to slowest round",
        "version counters",
        "sent instead",
        "without guards",
        title=f"Feeds with nothing to refresh, {run.environment.cpu.model}",
        title_justify="left",
    )
    for cost in run.costs:
        shown.add_row(
            str(cost.scalars),
            str(cost.tensors),
            format_bytes(cost.tensor_bytes) if cost.tensors else "",
            str(cost.kept),
            f"{cost.host_us:.2f}",
            f"{cost.fastest_us:.2f} to {cost.slowest_us:.2f}",
            f"{cost.trusted_us:.2f}",
            f"{cost.sent_us:.2f}" if cost.tensors else "",
            f"{cost.bare_us:.2f}",
        )
    return shown


@dataclass(frozen=True, slots=True)
class FeedCost:
    """Hold host time of one `Feeds.bind` in the steady state, over `rounds` rounds of `calls` calls, in microseconds.

    It is the calling thread's CPU time, so that other work on the machine does not count: nothing in here waits.
    `host_us` is the median round's time per call, `fastest_us` and `slowest_us` the spread. `trusted_us` is the median
    with `attributes="trust"`, which looks at version counters instead of bytes: what guards cost before they compared.
    `bare_us` is the median of what is left without any guard: passing the arguments on. `tensors` attributes of
    `tensor_bytes` each are compared; `sent_us` is the median of sending them in each call instead, which is done with
    larger ones (the copy into pinned memory; the transfer itself is not the host's).
    """

    scalars: int
    tensors: int
    tensor_bytes: int
    kept: int
    host_us: float
    fastest_us: float
    slowest_us: float
    trusted_us: float
    sent_us: float
    bare_us: float
    rounds: int
    calls: int


MASK_BYTES = 77 * 77 * 4
"""The causal mask of CLIP's text model."""


def measure_steady_feeds(
    *,
    scalars: int = 12,
    tensors: int = 1,
    tensor_bytes: int = MASK_BYTES,
    kept: int = 100,
    rounds: int = 15,
    calls: int = 2000,
) -> FeedCost:
    """Time the feeds of a graph with `scalars` attributes of rank 0, `tensors` larger ones, and `kept` other arguments.

    The defaults are a decoder with a NumPy scalar in every attention layer and a mask.
    """
    arguments = _arguments(scalars, tensors, tensor_bytes, kept)
    compared = _times(arguments, _feeds(arguments, Guard.VALUE), rounds, calls)
    trusted = _times(arguments, _feeds(arguments, Guard.VERSION), rounds, calls)
    sent = _times(arguments, _feeds(arguments, None), rounds, calls)
    bare_arguments = _arguments(0, 0, tensor_bytes, kept)
    bare = _times(bare_arguments, _feeds(bare_arguments, Guard.VALUE), rounds, calls)
    return FeedCost(
        scalars,
        tensors,
        tensor_bytes,
        kept,
        statistics.median(compared),
        min(compared),
        max(compared),
        statistics.median(trusted),
        statistics.median(sent),
        statistics.median(bare),
        rounds,
        calls,
    )


def _attributes(scalars: int, tensors: int, tensor_bytes: int) -> list[torch.Tensor]:
    return [torch.tensor(8.0 + i, dtype=torch.float64) for i in range(scalars)] + [
        torch.zeros(1, tensor_bytes // 4) for _ in range(tensors)
    ]


def _arguments(scalars: int, tensors: int, tensor_bytes: int, kept: int) -> tuple[torch.Tensor, ...]:
    """Return attributes spread among the other arguments, as layers spread them."""
    arguments = [torch.zeros(4) for _ in range(kept)]
    attributes = _attributes(scalars, tensors, tensor_bytes)
    for number, attribute in enumerate(attributes):
        arguments.insert((number + 1) * len(arguments) // (len(attributes) + 1), attribute)
    return tuple(arguments)


def _feeds(arguments: tuple[torch.Tensor, ...], guard: Guard | None) -> Feeds:
    """Return feeds of a graph that reads each attribute as it is. Arguments of rank 1 are the others.

    Attributes of rank 2 are guarded by `guard`, or sent in each call.
    """
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("attribute"),))
    identity = torch.fx.GraphModule(torch.nn.Module(), graph)
    groups, others, staged = [], [], []
    for index, argument in enumerate(arguments):
        layout = TensorLayout(tuple(argument.shape), tuple(argument.stride()), argument.dtype)
        if argument.dim() == 1:
            others.append(index)
        elif argument.dim() == 0:
            groups.append(HoistedGroup(identity, (Attribute(Guard.VALUE, index, None),), (layout,)))
        elif guard is not None:
            groups.append(HoistedGroup(identity, (Attribute(guard, index, None),), (layout,)))
        else:
            staged.append(Staged(Source("argument", index), layout))
    return Feeds(FeedPlan(device=torch.device("meta"), kept=tuple(others), hoisted=tuple(groups), staged=tuple(staged)))


def _times(arguments: tuple[torch.Tensor, ...], feeds: Feeds, rounds: int, calls: int) -> list[float]:
    """Return microseconds per call of each round."""
    feeds.bind(arguments)
    times = []
    for _ in range(rounds):
        start = time.thread_time_ns()
        for _ in range(calls):
            feeds.bind(arguments)
        times.append((time.thread_time_ns() - start) / calls / 1000)
    return times
