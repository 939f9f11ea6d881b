"""Report how the kernels of one CUDA graph are ordered, as a plain record. See `report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ConcurrencyDecision = Literal["chain", "branches", "waiting", "measuring"]


@dataclass(frozen=True, slots=True)
class ConcurrencyReport:
    """The decision whether kernels of a graph that do not depend on each other run at the same time.

    Attributes:
        decision: "chain" (one after the other, as captured), "branches", or what is under way until this is decided.
        reason: why; for a chain that was kept, what speaks against branches.
        launches: kernels and operators of the graph, in the order of capture.
        barriers: those of them whose memory is not known: they wait for all before them and hold back all after them.
        longest_path: launches on the longest chain that remains; `width`: most launches that may run side by side.
        chain_us, branches_us: median device time of a replay in microseconds, from the program's own calls; None where
            it was not measured.
        kept_bytes: memory that the recording took so that fewer launches wait for each other.
    """

    decision: ConcurrencyDecision
    reason: str
    launches: int = 0
    barriers: int = 0
    longest_path: int = 0
    width: int = 0
    chain_us: float | None = None
    branches_us: float | None = None
    kept_bytes: int = 0
