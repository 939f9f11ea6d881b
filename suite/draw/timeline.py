"""Place the launches of a graph on a time line: pure functions on records.

Each launch begins as soon as the launches that it waits for have ended, as if the GPU had room for all of them. So the
end of the time line is the least time that the graph can take, and not a measured one: kernels that run side by side
share the GPU and take longer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from optimizations.report.concurrency import ConcurrencyReport
from optimizations.report.recordings import RecordingReport


@dataclass(frozen=True, slots=True)
class DrawnGraph:
    """Hold one CUDA graph. `times_us` are the times of its launches as a chain, where they were measured."""

    title: str
    concurrency: ConcurrencyReport
    times_us: tuple[float, ...] | None = None


def graphs_of(title: str, recordings: Iterable[RecordingReport]) -> list[DrawnGraph]:
    """Return the graphs of these reports, without times."""
    reports = list(recordings)
    return [
        DrawnGraph(f"{title}, graph {number} of {len(reports)} ({report.direction})", report.concurrency)
        for number, report in enumerate(reports, start=1)
        if report.concurrency is not None
    ]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Hold launches by branch and time.

    Attributes:
        unit: of all times: "us", or "nodes" where each node of a launch counts as one.
        starts, ends: of each launch.
        branch_of: the branch that each launch is on; `branches` is their number.
        longest_path: indices of the launches that decide the end, first to last.
        crossings: pairs of launches on two branches, of which the second waits for the first.
        end: of the last launch; `total` is the sum of all launches, which a chain takes.
    """

    unit: str
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    branch_of: tuple[int, ...]
    branches: int
    longest_path: tuple[int, ...]
    crossings: tuple[tuple[int, int], ...]
    end: float
    total: float


def timeline(graph: DrawnGraph) -> Timeline:
    """Place the launches of a graph."""
    order = graph.concurrency.order
    lengths = graph.times_us if graph.times_us is not None else tuple(float(max(1, len(one.nodes))) for one in order)
    waits = [one.waits_for for one in order]
    starts, ends, latest = _times(waits, lengths)
    path: list[int] = []
    at = max(range(len(ends)), key=lambda one: ends[one], default=None)
    while at is not None:
        path.append(at)
        at = latest[at]
    branch_of, branches = _branches(waits, starts, ends, frozenset(path))
    return Timeline(
        unit="us" if graph.times_us is not None else "nodes",
        starts=tuple(starts),
        ends=tuple(ends),
        branch_of=tuple(branch_of),
        branches=branches,
        longest_path=tuple(reversed(path)),
        crossings=tuple(
            (earlier, later)
            for later, found in enumerate(waits)
            for earlier in found
            if branch_of[earlier] != branch_of[later]
        ),
        end=max(ends, default=0.0),
        total=sum(lengths),
    )


def _times(
    waits: Sequence[Sequence[int]], lengths: Sequence[float]
) -> tuple[list[float], list[float], list[int | None]]:
    """Return starts and ends, and for each launch the one it waits for that ends last."""
    starts: list[float] = []
    ends: list[float] = []
    latest: list[int | None] = []
    for found, length in zip(waits, lengths, strict=True):
        last = max(found, key=lambda one: ends[one], default=None)
        latest.append(last)
        starts.append(0.0 if last is None else ends[last])
        ends.append(starts[-1] + length)
    return starts, ends, latest


def _branches(
    waits: Sequence[Sequence[int]], starts: Sequence[float], ends: Sequence[float], path: Collection[int]
) -> tuple[list[int], int]:
    """Return the branch of each launch, and how many there are.

    A launch goes on where a launch that it waits for was the last one, else where there is room, else on a new branch.
    Of launches that begin together, the one on the longest path chooses first.
    """
    branch_of = [0] * len(waits)
    last: list[int] = []
    for index in sorted(range(len(waits)), key=lambda one: (starts[one], one not in path, one)):
        continued = [one for one in waits[index] if last[branch_of[one]] == one]
        free = [branch for branch, one in enumerate(last) if ends[one] <= starts[index]]
        if continued:
            branch = branch_of[max(continued, key=lambda one: ends[one])]
        elif free:
            branch = free[0]
        else:
            branch = len(last)
            last.append(index)
        branch_of[index] = branch
        last[branch] = index
    return branch_of, len(last)
