"""What the indirection microbenchmark varies. Pure, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Sweep = Literal["inputs", "bytes", "odd bytes", "nodes"]
Variant = Literal["copy", "host", "prelude", "ptx"]

VARIANTS: tuple[Variant, ...] = ("copy", "host", "prelude", "ptx")
"""`copy` is stock's way: one fused copy of all inputs into placeholders, then the graph."""

BASE_BYTES = 64 * 2**10
"""Bytes of an input where bytes are not what is varied."""

ODD_BYTES = 4
"""Added to powers of two: a copy whose size is not a multiple of 4096 bytes can be slower."""


@dataclass(frozen=True, slots=True)
class Point:
    """A graph to replay: `nodes` kernels that read `inputs` inputs of `input_bytes` each, in turn."""

    sweep: Sweep
    inputs: int
    input_bytes: int
    nodes: int

    @property
    def x(self) -> int:
        """The quantity its sweep varies."""
        return {"inputs": self.inputs, "nodes": self.nodes}.get(self.sweep, self.input_bytes)

    @property
    def device_bytes(self) -> int:
        """Memory it takes: a placeholder, and two sets of inputs to move between."""
        return 3 * self.inputs * self.input_bytes


def points(*, quick: bool = False) -> tuple[Point, ...]:
    """All points, or with `quick` every third of each sweep."""
    sweeps = (
        [Point("inputs", 2**power, BASE_BYTES, 2**power) for power in range(10)],
        [Point("bytes", 1, 2**power, 1) for power in range(10, 33, 2)],
        [Point("odd bytes", 1, 2**power + ODD_BYTES, 1) for power in range(12, 31, 3)],
        [Point("nodes", 1, BASE_BYTES, 2**power) for power in range(9)],
    )
    return tuple(point for sweep in sweeps for point in (sweep[::3] if quick else sweep))
