"""Define records of the indirection microbenchmark, as they are written to disk.

What the indirection microbenchmark varies. Pure, without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from suite.results.schema import Environment, Record
from suite.results.store import read_record

MICRO_SCHEMA_VERSION: Literal[1] = 1


class Series(Record):
    """Hold one variant at one point: time of each replay on the host to its completion, every sample.

    `moved`: the addresses of inputs changed since the last replay.
    """

    variant: Variant
    moved: bool
    host_us: list[float]


class MeasuredPoint(Record):
    """Hold a point and its variants, measured in alternating rounds.

    `sweep` is what is varied: "inputs". Records of release 0.1 also vary bytes and nodes.
    """

    sweep: str
    inputs: int
    series: list[Series]


class MicroRun(Record):
    """Hold `indirection.json`."""

    micro_schema_version: Literal[1]
    environment: Environment
    points: list[MeasuredPoint]


def read_micro_run(path: Path) -> MicroRun:
    """Return what a run of the microbenchmark wrote.

    Raises:
        InvalidResults: the file cannot be read, or is not such a record of this version; the message says which.
    """
    return read_record(MicroRun, path, "the microbenchmark", "`encore micro indirection` writes such files")


Variant = Literal["copy", "host", "prelude", "ptx"]

MEASURED: tuple[Variant, ...] = ("copy", "host", "prelude")
"""`copy` is stock's way: one fused copy of all inputs into placeholders, then the graph."""

VARIANTS: tuple[Variant, ...] = (*MEASURED, "ptx")
"""All that records have. `ptx`, Triton kernels rewritten to read the pointer table, was measured by release 0.1."""

INPUT_BYTES = 64 * 2**10
"""Bytes of each input. Graphs have one node for each input."""

COUNTS = tuple(2**power for power in range(10))
"""All numbers of inputs."""
