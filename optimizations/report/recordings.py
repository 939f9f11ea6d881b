"""What replay does with the inputs of one recording, as plain records. See `report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["inference", "forward", "backward"]


@dataclass(frozen=True, slots=True)
class ReplayedInput:
    """An input that is neither at a fixed address nor a result of another graph.

    Attributes:
        index: its place among the recording's inputs; `name` is the FX graph's name for it.
        data_bytes: its data, from the first element to the last.
        indirect: whether it is read in place; else its data is copied before each replay, for `reasons`.
        nodes, pointers: graph nodes that hold its address, and places in them.
        appliers: how these nodes get a new address ("host", "prelude", "ptx").
    """

    index: int
    name: str
    data_bytes: int
    indirect: bool
    mutated: bool
    nodes: int
    pointers: int
    appliers: tuple[str, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordingReport:
    """One CUDA graph recorded with indirection.

    Attributes:
        nodes, kernels: of the captured graph; None where it could not be read.
        copied_bytes: data copied into placeholders at each replay.
        pointer_bytes: written instead, in a replay in which every indirect input has moved.
        fallbacks: node by node, why an applier that was tried earlier was not taken.
        off: why nothing was indirected at all, where that is not for reasons of single inputs.
        proof_runs: runs of the graph that the proof took; `indirection_s` the time for all of it, captures included.
    """

    direction: Direction
    nodes: int | None
    kernels: int | None
    inputs: tuple[ReplayedInput, ...]
    copied_bytes: int
    pointer_bytes: int
    fallbacks: tuple[str, ...]
    off: str | None
    proof_runs: int
    indirection_s: float
