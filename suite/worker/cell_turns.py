"""The turns of this process on its GPU: one place among the processes of a workload, also while a kernel is tuned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from suite.measure.compile_times import untimed
from suite.worker.gpu_turns import GpuTurns

TURNS = "turns"
"""The file in the cache folder by which a workload's processes share the GPU."""


@cache
def turns_of(file: Path) -> GpuTurns:
    """One place for a process: it would wait for itself with two of them, and cells that follow one another tune by the
    first one's."""
    return GpuTurns(file, untimed)


@contextmanager
def alone_to_tune(turns: GpuTurns, device: str) -> Iterator[None]:
    """The GPU for this process, for as long as a kernel is tuned.

    What this process has launched is waited for before. It may be a collective, which ends when another rank has
    launched its part; and that rank must not wait for the turn on its own GPU of a process whose neighbour waits for
    the turn on this one.
    """
    if device == "cuda":
        torch.cuda.synchronize()
    with turns.alone():
        yield
