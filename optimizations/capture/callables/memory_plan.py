"""Plan which graphs may use the same memory. Pure.

What a forward keeps for its backward is alive from the one to the other. Two micro-batches whose times do not overlap
share a pool; those that overlap never do. Without backwards nothing is kept, and every callable's memory is free again
when its results have been read, which is not known: then only the micro-batches of one callable share a pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimizations.capture.callables.order import Event


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Record when the memory of one micro-batch of a callable is in use: places in the order, both included."""

    callable: int
    micro_batch: int
    begin: int
    end: int

    def overlaps(self, other: Lifetime) -> bool:
        return self.begin <= other.end and other.begin <= self.end


def lifetimes(order: Sequence[Event]) -> tuple[Lifetime, ...]:
    """Return one lifetime for each forward, in the order of the forwards."""
    ends = {
        (event.callable, event.micro_batch): place for place, event in enumerate(order) if event.direction == "backward"
    }
    return tuple(
        Lifetime(event.callable, event.micro_batch, place, ends.get((event.callable, event.micro_batch), place))
        for place, event in enumerate(order)
        if event.direction == "forward"
    )


def pools(order: Sequence[Event]) -> dict[tuple[int, int], int]:
    """Return the pool of each (callable, micro-batch): as few as can be, a callable's own former one if it is free.

    Callables differ in size and micro-batches of one do not, so a pool that was a callable's own fits exactly.
    """
    if all(event.direction == "forward" for event in order):
        return {(event.callable, event.micro_batch): event.callable - 1 for event in order}
    users: list[list[Lifetime]] = []
    found: dict[tuple[int, int], int] = {}
    for lifetime in lifetimes(order):
        free = [
            number for number, members in enumerate(users) if not any(lifetime.overlaps(other) for other in members)
        ]
        own = [number for number in free if any(other.callable == lifetime.callable for other in users[number])]
        number = (own or free or [len(users)])[0]
        if number == len(users):
            users.append([])
        users[number].append(lifetime)
        found[lifetime.callable, lifetime.micro_batch] = number
    return found


def most_alive(order: Sequence[Event]) -> int:
    """Return how many micro-batches, of all callables, are alive at one time at most: the least number of pools."""
    spans = lifetimes(order)
    return max(sum(span.begin <= place <= span.end for span in spans) for place in range(len(order)))
