"""Order the launches of a captured graph by the memory they access: pure functions on records.

A graph that was captured from one stream is a chain: each node waits for the previous one. Most of these dependencies
carry no data. Here a launch waits for an earlier launch only if both access the same memory and one of them writes it.
Memory that the allocator reused is a conflict like any other, so reuse costs parallelism and never correctness.

Note [Barriers]. A launch whose memory is not exactly known is a barrier: it waits for every earlier launch, and every
later launch waits for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

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
        line: file and line of the generated code, for reports; None if unknown.
    """

    name: str
    first: int
    count: int = 1
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    barrier: str | None = None
    line: tuple[str, int] | None = None

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
    touched = _Touched()
    before: list[int] = []
    waits_for: list[tuple[int, ...]] = []
    sinks: set[int] = set()
    floor: int | None = None
    for index, launch in enumerate(launches):
        if launch.barrier is not None:
            found: Iterable[int] = sinks
            touched = _Touched()
            floor = index
        else:
            found = touched.conflicts(launch.reads, launch.writes)
            touched.add(index, launch.reads, launch.writes)
            if not found and floor is not None:
                found = {floor}
        waits, ancestors = _reduced(found, before)
        waits_for.append(waits)
        before.append(ancestors)
        sinks.difference_update(waits)
        sinks.add(index)
    return LaunchOrder(tuple(launches), tuple(waits_for))


def _reduced(found: Iterable[int], before: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the waits that other waits do not imply, and all earlier launches in a bit set."""
    kept = []
    ancestors = 0
    for one in sorted(found, reverse=True):
        if not ancestors >> one & 1:
            kept.append(one)
            ancestors |= before[one] | 1 << one
    return tuple(reversed(kept)), ancestors


@dataclass(slots=True)
class _Use:
    """Hold the last uses of a piece of memory: the launch that wrote it, and the launches that read it since."""

    writer: int | None = None
    readers: list[int] = field(default_factory=list)


class _Touched:
    """Hold the last uses of memory, by address: disjoint pieces, ascending."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._uses: list[_Use] = []

    def conflicts(self, reads: Iterable[Span], writes: Iterable[Span]) -> set[int]:
        """Return the launches that a launch with these accesses must wait for."""
        found: set[int] = set()
        for start, end in reads:
            found.update(use.writer for use in self._overlapping(start, end) if use.writer is not None)
        for start, end in writes:
            for use in self._overlapping(start, end):
                found.update(use.readers)
                if use.writer is not None:
                    found.add(use.writer)
        return found

    def add(self, launch: int, reads: Iterable[Span], writes: Iterable[Span]) -> None:
        """Note that a launch accesses these spans, after all launches noted before."""
        for start, end in reads:
            for piece in self._pieces(start, end):
                self._uses[piece].readers.append(launch)
        for start, end in writes:
            if start >= end:
                continue
            pieces = self._pieces(start, end)
            first, last = pieces.start, pieces.stop
            self._starts[first:last] = [start]
            self._ends[first:last] = [end]
            self._uses[first:last] = [_Use(writer=launch)]

    def _overlapping(self, start: int, end: int) -> Iterator[_Use]:
        first = bisect_right(self._ends, start)
        while first < len(self._starts) and self._starts[first] < end:
            yield self._uses[first]
            first += 1

    def _pieces(self, start: int, end: int) -> range:
        """Split pieces and fill gaps so that some pieces exactly cover this memory; return their indices."""
        if start >= end:
            return range(0)
        self._cut(start)
        self._cut(end)
        at = bisect_left(self._starts, start)
        first = at
        while start < end:
            if at == len(self._starts) or self._starts[at] > start:
                upto = min(end, self._starts[at]) if at < len(self._starts) else end
                self._starts.insert(at, start)
                self._ends.insert(at, upto)
                self._uses.insert(at, _Use())
            start = self._ends[at]
            at += 1
        return range(first, at)

    def _cut(self, address: int) -> None:
        at = bisect_right(self._starts, address) - 1
        if at >= 0 and self._starts[at] < address < self._ends[at]:
            use = self._uses[at]
            self._starts.insert(at + 1, address)
            self._ends.insert(at + 1, self._ends[at])
            self._ends[at] = address
            self._uses.insert(at + 1, _Use(use.writer, list(use.readers)))
