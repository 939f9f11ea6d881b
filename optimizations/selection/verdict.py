"""A verdict as it is stored: one JSON file with a checksum, checked field by field when it is read.

The checksum is of the values in the file, not of its bytes. A file that is only formatted otherwise is still valid. One
in which a value was changed, by a disk or by hand, is not.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from optimizations.selection.decide import Decision, EndedBy

FORMAT: Literal["encore verdict"] = "encore verdict"
VERSION: Literal[4] = 4

CHECKSUM = "checksum"
"""The name of the checksum's field in the file. The verdict's own fields stand next to it."""


class UnreadableVerdict(ValueError):
    """A file is not a verdict of this version; the message says what is wrong with it."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Circumstances(_Record):
    """What a verdict holds for. `graph` is a digest of the generated code, `options` of what else decides how it runs.

    `objective` is what was measured: host time to completion, or time back to back. `moving` is whether addresses of
    inputs moved from call to call, of the graph that an iteration begins with.
    """

    graph: str = Field(pattern=r"^[0-9a-f]{64}$")
    options: str
    objective: Literal["latency", "throughput"]
    gpu: str
    driver: str
    host: str
    torch: str
    encore: str
    moving: bool

    def with_inputs(self, *, moving: bool) -> Circumstances:
        """The same, where inputs move or where they do not."""
        return self.model_copy(update={"moving": moving})


class Compared(_Record):
    """How many times the time of the kept candidate `candidate` takes, with an interval, over `rounds` rounds.

    `low` and `high` are None where there were too few rounds for a bound.
    """

    candidate: str
    ratio: float = Field(gt=0, allow_inf_nan=False)
    low: float | None = Field(ge=0, allow_inf_nan=False)
    high: float | None = Field(ge=0, allow_inf_nan=False)
    rounds: int = Field(ge=0)


class StoredVerdict(_Record):
    """What was found for one graph, alone or judged together with its neighbours.

    Attributes:
        circumstances: what it holds for; the file's name is their digest.
        group: digests of all graphs that were judged together, sorted; this one's is among them.
        candidates: simplest first; `kept` is one of them.
        leads: whether this is the graph that an iteration begins with.
        calls, measuring_s, excess_s: what measuring took; see `selector.Spent`.
        rounds, ended_by: what it was decided on, and why measuring ended then; see `report.selection.SelectionReport`.
        median_s: median time of an iteration by candidate, in seconds.
        direction: "inference", "forward" or "backward".
    """

    format: Literal["encore verdict"] = FORMAT
    version: Literal[4] = VERSION
    circumstances: Circumstances
    group: tuple[str, ...]
    candidates: tuple[str, ...]
    kept: str
    outcome: Literal["faster", "same", "unresolved"]
    compared: tuple[Compared, ...]
    median_s: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    leads: bool
    calls: int = Field(ge=0)
    measuring_s: float = Field(ge=0, allow_inf_nan=False)
    excess_s: float = Field(ge=0, allow_inf_nan=False)
    rounds: int = Field(ge=0)
    ended_by: EndedBy
    measured_at: str
    direction: Literal["inference", "forward", "backward"]

    @model_validator(mode="after")
    def _is_whole(self) -> StoredVerdict:
        if self.kept not in self.candidates:
            raise ValueError(f"{self.kept!r} is kept and not among the candidates {self.candidates}")
        others = {one.candidate for one in self.compared} | self.median_s.keys()
        if not others <= set(self.candidates):
            raise ValueError(f"times are of {sorted(others)}, and the candidates are {self.candidates}")
        if list(self.group) != sorted(set(self.group)):
            raise ValueError("the group is not sorted, or names a graph twice")
        return self

    def is_with(self, other: StoredVerdict) -> bool:
        """Whether both are the same verdict, on graphs that were judged together."""
        return (self.group, self.kept, self._elsewhere) == (other.group, other.kept, other._elsewhere)

    @property
    def _elsewhere(self) -> Circumstances:
        return self.circumstances.model_copy(update={"graph": ""})

    def to_json(self) -> bytes:
        fields = json.loads(self.model_dump_json())
        return json.dumps({**fields, CHECKSUM: checksum(fields)}, indent=1).encode() + b"\n"


def checksum(fields: dict[str, Any]) -> str:
    """SHA-256 of a verdict's fields, as they are in JSON, in whatever order they stand.

    Raises:
        RecursionError: they are too deep for a verdict's.
    """
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def parse_verdict(content: bytes) -> StoredVerdict:
    """The verdict in a file.

    Raises:
        UnreadableVerdict: it is not one.
    """
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnreadableVerdict(f"it is not JSON ({error})".splitlines()[0]) from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise UnreadableVerdict("it is not a verdict of Encore's")
    if raw.get("version") != VERSION:
        raise UnreadableVerdict(f"it has version {raw.get('version')!r}, and this Encore reads version {VERSION}")
    stated = raw.pop(CHECKSUM, None)
    try:
        if stated != checksum(raw):
            raise UnreadableVerdict("it was damaged or changed by hand: its checksum is of something else")
        return StoredVerdict.model_validate_json(json.dumps(raw))
    except RecursionError:
        raise UnreadableVerdict("it is too deep") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise UnreadableVerdict(f"{place}: {first['msg']}") from None


def compared(decision: Decision) -> tuple[Compared, ...]:
    """The comparisons of a decision as they are stored."""
    return tuple(
        Compared(
            candidate=one.other,
            ratio=one.ratio.estimate,
            low=one.ratio.low if one.ratio.low > 0 else None,
            high=one.ratio.high if math.isfinite(one.ratio.high) else None,
            rounds=one.rounds,
        )
        for one in decision.comparisons
    )
