"""Define the records of recorded graphs, and of how the calls of one function run. See `report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from optimizations.report.concurrency import ConcurrencyReport
from optimizations.selection import Decision

Direction = Literal["inference", "forward", "backward"]

MEMORY = "memory"
"""The beginning of each reason that is about short device memory."""


@dataclass(frozen=True, slots=True)
class ReplayedInput:
    """Describe an input that is neither at a fixed address nor a result of another graph.

    Attributes:
        index: its position among the recording's inputs; `name` is its name in the FX graph.
        data_bytes: size of its data, from the first element to the last.
        indirect: whether it is read in place; else its data is copied before each replay, for `reasons`.
        mutated: whether the function writes it.
        nodes, pointers: numbers of graph nodes that hold its address, and of its addresses in them.
        updaters: how these nodes get a new address ("host", "prelude").
        has_placeholder: whether the graph's memory has a placeholder for a copy of it.
    """

    index: int
    name: str
    data_bytes: int
    indirect: bool
    mutated: bool
    nodes: int
    pointers: int
    updaters: tuple[str, ...]
    reasons: tuple[str, ...]
    has_placeholder: bool = True


@dataclass(frozen=True, slots=True)
class RecordingReport:
    """Describe one CUDA graph, recorded as stock records it, and its later changes.

    Attributes:
        nodes, kernels: their numbers in the captured graph; None if it was not read (yet).
        copied_bytes: data copied into placeholders at each replay.
        pointer_bytes: bytes written instead, in a replay in which every indirect input has moved.
        fallbacks: for each node, why the preferred updater was not used.
        off: why no input at all is read in place, if the reason is not about single inputs.
        stage: "waiting" (not examined yet), "racing" (a chain is timed against branches), or "done".
        waiting: the reason for waiting; None if nothing is pending.
        replays: calls that replayed the graph so far; `steady_replays` counts those on the fast path.
        moves: calls in which an input that is read in place had moved.
        total_copied_bytes, total_pointer_bytes: bytes copied, and written, by all replays so far.
        concurrency: whether independent kernels run at the same time.
    """

    direction: Direction
    nodes: int | None
    kernels: int | None
    inputs: tuple[ReplayedInput, ...]
    copied_bytes: int
    pointer_bytes: int
    fallbacks: tuple[str, ...]
    off: str | None
    stage: str = "done"
    waiting: str | None = None
    replays: int = 0
    moves: int = 0
    total_copied_bytes: int = 0
    total_pointer_bytes: int = 0
    steady_replays: int = 0
    concurrency: ConcurrencyReport | None = None

    @property
    def waits_for_memory(self) -> bool:
        """Return whether the recording waits for device memory, which more calls do not change."""
        return self.waiting is not None and self.waiting.startswith(MEMORY)


@dataclass(frozen=True, slots=True)
class KeptResults:
    """Report results that were live when the graph would have overwritten them.

    Since then they are copied out of the graph's memory after each launch.

    Attributes:
        outputs: their positions among the function's results.
        copies: how many copies were made; `copied_bytes` is their total size.
    """

    direction: Direction
    outputs: tuple[int, ...]
    copies: int
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class CountedCalls:
    """Count the calls of a function that ran without a graph, or on the slow path, for one reason."""

    direction: Direction
    reason: str
    calls: int


@dataclass(frozen=True, slots=True)
class SelectionReport:
    """Report how calls of one function of Inductor's run, and why.

    Attributes:
        decision: "no graph", "copies" (a graph that copies its inputs) or "in place" (a graph that reads some inputs in
            place); None if that is not decided yet, or the function cannot be recorded.
        why: the numbers that decided it, or the reason for waiting.
        kernels: kernels of its graph, or of the generated code if no graph was read; None if neither is known.
        copied_bytes: data that each replay copies; None if no graph was recorded.
        nodes: nodes of the graph that get new addresses when all inputs that are read in place have moved.
        median_us: measured time of each alternative, with `selection="measure"`.
    """

    direction: Direction
    decision: Decision | None
    why: str
    kernels: int | None
    copied_bytes: int | None
    nodes: int
    median_us: tuple[tuple[str, float], ...] = ()
