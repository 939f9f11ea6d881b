"""Define the records of recordings, and of how the calls of one function run. See `report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from optimizations.report.concurrency import ConcurrencyReport
from optimizations.selection import Decision

Direction = Literal["inference", "forward", "backward"]

MEMORY = "memory"
"""What a reason begins with that is about lack of device memory."""


@dataclass(frozen=True, slots=True)
class ReplayedInput:
    """Describe an input that is neither at a fixed address nor a result of another graph.

    Attributes:
        index: its place among the recording's inputs; `name` is the FX graph's name for it.
        data_bytes: its data, from the first element to the last.
        indirect: whether it is read in place; else its data is copied before each replay, for `reasons`.
        mutated: whether the function writes it.
        nodes, pointers: graph nodes that hold its address, and places in them.
        updaters: how these nodes get a new address ("host", "prelude").
        has_placeholder: whether memory of the graph is reserved for a copy of it.
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
    """Describe one CUDA graph, recorded as stock records it, and what was done with it since.

    Attributes:
        nodes, kernels: of the captured graph; None where it was not read (yet).
        copied_bytes: data copied into placeholders at each replay.
        pointer_bytes: written instead, in a replay in which every indirect input has moved.
        fallbacks: node by node, why an updater that was tried earlier was not used.
        off: why nothing was indirected at all, where that is not for reasons of single inputs.
        stage: "waiting" (not examined yet), "racing" (a chain is timed against branches), or "done".
        waiting: what is being waited for; None where nothing is.
        replays: calls served by the graph so far; `steady_replays` of them without what a call of stock's does.
        moves: those in which an input that is read in place had moved.
        total_copied_bytes, total_pointer_bytes: copied, and written, by all replays so far.
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
        """Return whether device memory is waited for: more calls alone do not help then."""
        return self.waiting is not None and self.waiting.startswith(MEMORY)


@dataclass(frozen=True, slots=True)
class KeptResults:
    """Report results that the program was found to hold when the graph would have overwritten them.

    They are copied out of the graph's memory after each launch since then.

    Attributes:
        outputs: their places among what the function returns.
        copies: how often one was copied; `copied_bytes` in all.
    """

    direction: Direction
    outputs: tuple[int, ...]
    copies: int
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class CountedCalls:
    """Count the calls of a function that something happened to for this reason."""

    direction: Direction
    reason: str
    calls: int


@dataclass(frozen=True, slots=True)
class SelectionReport:
    """Tell how calls of one function of Inductor's run, and why.

    Attributes:
        decision: "no graph", "copies" (a graph that copies its inputs) or "in place" (one that reads some where they
            are); None where that is not decided yet, or the function cannot be recorded.
        why: the numbers that decided it, or what is being waited for.
        kernels: kernels of its graph, or of the generated code where none was read; None where neither is known.
        copied_bytes: data that each replay copies; None where no graph was recorded.
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
