"""Report how the kernels of one CUDA graph are ordered, as a plain record. See `report`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ConcurrencyDecision = Literal["chain", "branches", "waiting", "measuring"]


@dataclass(frozen=True, slots=True)
class OrderedLaunch:
    """Describe a kernel or an operator of a graph, and the launches that it waits for.

    Attributes:
        name: of the Triton kernel or the operator.
        nodes: the nodes it added to the graph: the driver's names of kernels, or "memcpy", "memset", ...
        waits_for: indices of earlier launches, ascending, transitively reduced.
        barrier: why it waits for all earlier launches, and all later ones wait for it; None if its memory is known.
        source_line: the program's line that it comes from; None if PyTorch does not know it.
    """

    name: str
    nodes: tuple[str, ...]
    waits_for: tuple[int, ...]
    barrier: str | None = None
    source_line: str | None = None


@dataclass(frozen=True, slots=True)
class ConcurrencyReport:
    """Report whether independent kernels of a graph run at the same time.

    Attributes:
        decision: "chain" (one after the other, as captured), "branches", or the current stage before the decision.
        reason: the reason for the decision.
        launches: number of kernels and operators of the graph.
        barriers: number of launches whose memory is not known: they wait for all earlier launches, and all later ones
            wait for them.
        longest_path: launches on the longest chain that remains; `width`: most launches that may run concurrently.
        chain_us, branches_us: median device time of a replay in microseconds, from the program's own calls; None if it
            was not measured.
        kept_bytes: memory that was kept from reuse so that fewer launches wait for each other.
        order: each launch with the launches it waits for with branches; empty if launches were not ordered. `encore
            draw graph` draws it.
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
    order: tuple[OrderedLaunch, ...] = field(default=(), repr=False)
