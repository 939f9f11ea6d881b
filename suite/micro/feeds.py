"""Host time of placement's feeds in a call with nothing to refresh, over numbers of guarded attributes.

Measured without a GPU: in such a call nothing is sent to the device, so the work is the same whatever the device is.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from optimizations.placement.benchmark import FeedCost, measure_steady_feeds
from suite.schema import Environment, Record

SCALARS = (0, 1, 6, 12, 24)
"""Attributes of rank 0. Six and twelve are those of ST's encoder and decoder graphs."""
TENSORS = (0, 1)
"""Larger attributes, such as a mask."""


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


def table(run: FeedRun) -> Table:
    """The costs for a terminal."""
    shown = Table(
        "scalars",
        "tensors",
        "other arguments",
        "µs per call",
        "fastest to slowest round",
        "without guards",
        title=f"Feeds with nothing to refresh, {run.environment.cpu.model}",
        title_justify="left",
    )
    for cost in run.costs:
        shown.add_row(
            str(cost.scalars),
            str(cost.tensors),
            str(cost.kept),
            f"{cost.host_us:.2f}",
            f"{cost.fastest_us:.2f} to {cost.slowest_us:.2f}",
            f"{cost.bare_us:.2f}",
        )
    return shown
