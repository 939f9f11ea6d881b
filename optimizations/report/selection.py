"""What selection found for one graph, as plain records. See `report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from optimizations.report.recordings import Direction

State = Literal["waiting", "measuring", "decided", "off"]
Source = Literal["measured", "stored"]


@dataclass(frozen=True, slots=True)
class CandidateTime:
    """A way to serve calls, and how long calls took.

    Attributes:
        candidate: "none" (the generated function without a graph), "copy" (stock's replay, inputs copied) or
            "indirection" (inputs read in place).
        calls: measured calls of it; 0 where the verdict was stored.
        median_us: their median; None where there are none.
        ratio: how many times the time of the candidate that is kept it takes, between `low` and `high` with the
            certainty that was asked for; None where it is the one that is kept, was not compared, or has no bound.
    """

    candidate: str
    calls: int
    median_us: float | None
    ratio: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class SelectionReport:
    """How calls of one function of Inductor's are served, and why.

    Attributes:
        state: "waiting" (for `reason`), "measuring", "decided" or "off" (because of `reason`). Where several ranks
            decided, `reason` says so.
        group: numbers the functions that were judged together, and are served alike; `functions` is how many.
        objective: what was measured: "latency" (host time to completion) or "throughput" (back to back).
        kept: the candidate; None before it is decided.
        outcome: "faster" than a simpler one, "same" (the simplest is kept), or "unresolved" (measuring ended before
            either was sure).
        rounds: what it was decided on: rounds that count, of a block of calls by each candidate.
        ended_by: what ended measuring: "certainty", or what it may take at most: "calls", "time", "cost" (`budget_s`);
            None before it is decided.
        source: whether it was measured in this process, or stored by an earlier one.
        calls, measuring_s, excess_s: measured calls of the group, their time, and how much longer the program took
            than with the fastest candidate unmeasured. `waiting_s` of that is because the device was waited for, as
            estimated from a few iterations without.
        voided: why earlier verdicts were given up, measured or stored.
        not_stored: why the verdict is not stored; None where it is, or there is none.
        budget_s: what `excess_s` may be for all groups of its compilation together; None where that is not known.
        kernels: of its graph; None where none was recorded, or it was not read.
        input_bytes: data that stock would copy before each replay; None where no graph was recorded, as for the next.
        copied_bytes, pointer_bytes: what replays copy as they are served now, and what they write where all inputs
            that are read in place moved.
    """

    direction: Direction
    state: State
    reason: str | None
    group: int
    functions: int
    objective: str
    candidates: tuple[CandidateTime, ...]
    kept: str | None
    outcome: str | None
    source: Source | None
    calls: int
    measuring_s: float
    excess_s: float
    voided: tuple[str, ...]
    not_stored: str | None
    kernels: int | None = None
    input_bytes: int | None = None
    copied_bytes: int | None = None
    pointer_bytes: int | None = None
    budget_s: float | None = None
    waiting_s: float = 0.0
    rounds: int = 0
    ended_by: str | None = None
