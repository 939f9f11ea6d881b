"""Order the launches of a captured graph by the memory they access: pure functions on records.

A graph that was captured from one stream is a chain: each node waits for the previous one. Most of these dependencies
carry no data. Here a launch waits for an earlier launch only if both access the same memory and one of them writes it.
Memory that the allocator reused is a conflict like any other, so reuse costs parallelism and never correctness.

Note [Barriers]. A launch whose memory is not exactly known is a barrier: it waits for every earlier launch, and every
later launch waits for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import CodeType

Span = tuple[int, int]
"""Device memory from its first address up to, but not including, its second."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Hold the nodes that one operator, or one Triton kernel, added to a graph.

    Attributes:
        name: name of the kernel or operator, for reports.
        first: index of its first node, in the order of capture; `count`: how many nodes it added, at least one.
        reads, writes: memory that it accesses, as address ranges on the device.
        barrier: why its memory is not exactly known; None if `reads` and `writes` are complete.
        place: code and instruction of the generated module, for reports; None if unknown.
    """

    name: str
    first: int
    count: int = 1
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    barrier: str | None = None
    place: tuple[CodeType, int] | None = None

    @property
    def last(self) -> int:
        """Return the index of its last node."""
        return self.first + self.count - 1


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """Hold for each launch the launches that it waits for.

    Attributes:
        launches: in the order of capture; together they are all nodes of the graph.
        waits_for: for each launch, the launches it waits for (indices, ascending), transitively reduced.
    """

    launches: tuple[Launch, ...]
    waits_for: tuple[tuple[int, ...], ...]

    def node_edges(self) -> list[tuple[int, int]]:
        """Return the graph's edges between nodes. The nodes of one launch stay in their order."""
        edges = []
        for launch, waits in zip(self.launches, self.waits_for, strict=True):
            edges += [(node, node + 1) for node in range(launch.first, launch.last)]
            edges += [(self.launches[earlier].last, launch.first) for earlier in waits]
        return edges

    def levels(self) -> list[int]:
        """Return for each launch the length of the longest chain of launches before it."""
        levels: list[int] = []
        for waits in self.waits_for:
            levels.append(1 + max((levels[one] for one in waits), default=-1))
        return levels

    @property
    def branches(self) -> int:
        """Return the most launches that run concurrently, if all take equally long."""
        return max(Counter(self.levels()).values(), default=0)


def order_launches(launches: Sequence[Launch]) -> LaunchOrder:
    """Return the fewest waits that keep every two launches in order if one writes memory that the other accesses.

    Raises:
        ValueError: the launches do not cover consecutive nodes.
    """
    expected = 0
    for launch in launches:
        if launch.first != expected or launch.count < 1:
            raise ValueError(
                f"{launch.name} begins at node {launch.first}, and the launches before it end at {expected}"
            )
        expected += launch.count
    pieces_of, count = _pieces(launches)
    writers, readers = [_NONE] * count, [_NONE] * count
    reads: list[tuple[int, int]] = []  # of a piece: the launch, and the place in this list of the read before
    before: list[int] = []
    waits_for: list[tuple[int, ...]] = []
    sinks: set[int] = set()
    floor: int | None = None
    for index, launch in enumerate(launches):
        if launch.barrier is not None:
            found, floor = set(sinks), index
            writers, readers = [_NONE] * count, [_NONE] * count
        else:
            read, written = pieces_of(launch.reads), pieces_of(launch.writes)
            found = {writer for pieces in (*read, *written) for writer in set(writers[pieces])}
            for last in {last for pieces in written for last in set(readers[pieces])}:
                while last != _NONE:
                    reader, last = reads[last]
                    found.add(reader)
            found.discard(_NONE)
            if not found and floor is not None:
                found = {floor}
            for pieces in read:
                added = {}
                for last in set(readers[pieces]):
                    added[last] = len(reads)
                    reads.append((index, last))
                readers[pieces] = [added[last] for last in readers[pieces]]
            for pieces in written:
                size = pieces.stop - pieces.start
                writers[pieces], readers[pieces] = [index] * size, [_NONE] * size
        waits, ancestors = _reduced(found, before)
        waits_for.append(waits)
        before.append(ancestors)
        sinks.difference_update(waits)
        sinks.add(index)
    return LaunchOrder(tuple(launches), tuple(waits_for))


_NONE = -1
"""The last writer or read of a piece that has none."""


def _pieces(launches: Iterable[Launch]) -> tuple[Callable[[Iterable[Span]], list[slice]], int]:
    """Return a function that gives the pieces of memory in each span, and the number of all pieces.

    Nothing begins or ends inside of a piece. A large block may have thousands, so they are taken as slices of lists.
    """
    known = (span for launch in launches if launch.barrier is None for span in (*launch.reads, *launch.writes))
    borders = sorted(set(chain.from_iterable(known)))

    def pieces(spans: Iterable[Span]) -> list[slice]:
        return [slice(bisect_left(borders, start), bisect_left(borders, end)) for start, end in spans if start < end]

    return pieces, len(borders)


def _reduced(found: Iterable[int], before: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the waits that other waits do not imply, and all earlier launches in a bit set."""
    kept = []
    ancestors = 0
    for one in sorted(found, reverse=True):
        if not ancestors >> one & 1:
            kept.append(one)
            ancestors |= before[one] | 1 << one
    return tuple(reversed(kept)), ancestors
