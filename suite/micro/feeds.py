"""Host time of placement's feeds in a call with nothing to refresh, over numbers of guarded attributes.

Measured without a GPU: in such a call nothing is sent to the device, so the work is the same whatever the device is.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from optimizations.byte_units import format_bytes
from suite.micro.feed_costs import FeedCost, measure_steady_feeds
from suite.results.schema import Environment, Record

SCALARS = (0, 1, 6, 12, 24)
"""Attributes of rank 0. Six and twelve are those of ST's encoder and decoder graphs."""
TENSORS = (0, 1)
"""Larger attributes, such as a mask."""
TENSOR_BYTES = (4 * 2**10, 16 * 2**10, 64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20)
"""One larger attribute of these sizes: up to some of them comparing costs less than sending."""


class FeedRun(Record):
    """`feeds.json`: the machine, and a cost for each point."""

    micro_schema_version: int
    environment: Environment
    costs: list[FeedCost]


def measure() -> Iterator[FeedCost]:
    """A cost for each point, as it is measured."""
    for tensors in TENSORS:
        for scalars in SCALARS:
            yield measure_steady_feeds(scalars=scalars, tensors=tensors)
    for tensor_bytes in TENSOR_BYTES:
        calls = min(2000, 2**27 // tensor_bytes)
        yield measure_steady_feeds(scalars=0, tensors=1, tensor_bytes=tensor_bytes, calls=calls)


def table(run: FeedRun) -> Table:
    """The costs for a terminal."""
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
