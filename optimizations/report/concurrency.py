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
        nodes: what it added to the graph: names of kernels as the driver knows them, or "memcpy", "memset", ...
        waits_for: indices of earlier launches, ascending, without those that follow from others.
        barrier: why it waits for all before it and holds back all after it; None where its memory is known.
        source_line: the program's line that it comes from; None where PyTorch does not know it.
    """

    name: str
    nodes: tuple[str, ...]
    waits_for: tuple[int, ...]
    barrier: str | None = None
    source_line: str | None = None


@dataclass(frozen=True, slots=True)
class ConcurrencyReport:
    """Report the decision whether kernels of a graph that do not depend on each other run at the same time.

    Attributes:
        decision: "chain" (one after the other, as captured), "branches", or what is under way until this is decided.
        reason: why; for a chain that was kept, what speaks against branches.
        launches: kernels and operators of the graph, in the order of capture.
        barriers: those of them whose memory is not known: they wait for all before them and hold back all after them.
        longest_path: launches on the longest chain that remains; `width`: most launches that may run side by side.
        chain_us, branches_us: median device time of a replay in microseconds, from the program's own calls; None where
            it was not measured.
        kept_bytes: memory that the recording took so that fewer launches wait for each other.
        order: each launch with what it waits for among branches; empty where launches were not ordered. `encore draw
            graph` draws it.
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
