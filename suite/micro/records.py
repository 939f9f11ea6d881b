"""Records of the indirection microbenchmark, as they are written to disk."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from suite.micro.sweeps import Point, Sweep, Variant
from suite.results.errors import WrongUse
from suite.results.schema import Environment, GpuState, Record
from suite.results.store import read_unpacked

MICRO_SCHEMA_VERSION = 1


class Series(Record):
    """One variant at one point: time of each replay on the host to its completion, every sample.

    `moved`: the inputs lie at other addresses than in the replay before. `unavailable` says why there are no samples.
    `pointer_bytes` and `copied_bytes` are those of one replay.
    """

    variant: Variant
    moved: bool
    host_us: list[float]
    copied_bytes: int
    pointer_bytes: int
    unavailable: str | None = None


class MeasuredPoint(Record):
    """A point and its variants, measured in alternating rounds."""

    sweep: Sweep
    inputs: int
    input_bytes: int
    nodes: int
    series: list[Series]
    gpu_before: GpuState | None
    gpu_after: GpuState | None
    skipped: str | None = None

    @property
    def point(self) -> Point:
        return Point(self.sweep, self.inputs, self.input_bytes, self.nodes)


class MicroRun(Record):
    """`indirection.json`."""

    micro_schema_version: int
    environment: Environment
    points: list[MeasuredPoint]


def read_micro_run(path: Path) -> MicroRun:
    """What a run of the microbenchmark wrote.

    Raises:
        WrongUse: the file cannot be read, or is not such a record of this version; the message says which.
    """
    try:
        run = MicroRun.model_validate_json(read_unpacked(path))
    except OSError as error:
        raise WrongUse(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise WrongUse(f"{path} holds no results of the microbenchmark: {where}: {first['msg']}") from error
    if run.micro_schema_version != MICRO_SCHEMA_VERSION:
        raise WrongUse(
            f"{path} has schema version {run.micro_schema_version}, this is {MICRO_SCHEMA_VERSION}; measure it again"
        )
    return run
