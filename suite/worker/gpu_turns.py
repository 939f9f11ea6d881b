"""Lock a GPU that several processes use: shared for calls of a program, or exclusive for one process.

It is a lock on a file, so that the system releases it when a process is killed.

A process has one lock object for its workload, which tuning uses too. torch is imported where it is used.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

MOST_WAIT_S = 120.0
"""Longest wait: if the process that has the lock hangs, the others continue without it after this time."""

_POLL_S = 0.005


class GpuTurns:
    """Lock the GPU by `file` for this process. Not thread-safe.

    Attributes:
        waited_s: seconds that this process has waited for the lock since the caller last set this to 0.
    """

    def __init__(self, file: Path) -> None:
        self.waited_s = 0.0
        file.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._held = fcntl.LOCK_UN

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Take the shared lock for the block: other processes may call, and none has the GPU exclusively."""
        with self._turn(fcntl.LOCK_SH):
            yield

    @contextmanager
    def alone(self, most_wait_s: float | None = None) -> Iterator[None]:
        """Take the exclusive lock for the block. A shared lock is released before, and taken again after it.

        `most_wait_s`: seconds to wait at most, if not `MOST_WAIT_S`.
        """
        with self._turn(fcntl.LOCK_EX, most_wait_s):
            yield

    @contextmanager
    def _turn(self, kind: int, most_wait_s: float | None = None) -> Iterator[None]:
        before = self._held
        if before in (kind, fcntl.LOCK_EX):
            yield
            return
        self._take(kind, most_wait_s)
        try:
            yield
        finally:
            self._take(before)

    def _take(self, kind: int, most_wait_s: float | None = None) -> None:
        """Change the kind of lock. The old lock is released first, because two waiting processes would deadlock."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._held = fcntl.LOCK_UN
        if kind == self._held or self._gets(kind):
            return
        most_s = MOST_WAIT_S if most_wait_s is None else most_wait_s
        begin = time.monotonic()
        while not self._gets(kind):
            if time.monotonic() > begin + most_s:
                print(f"another process has had the GPU for itself for {most_s:.0f} s; going on next to it")
                break
            time.sleep(_POLL_S)
        self.waited_s += time.monotonic() - begin

    def _gets(self, kind: int) -> bool:
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._held = kind
        return True


TURNS = "turns"
"""The lock file in the cache folder by which a workload's processes share the GPU."""


@cache
def turns_of(file: Path) -> GpuTurns:
    """Return the lock object of this process; with two of them it would wait for itself."""
    return GpuTurns(file)


@contextmanager
def alone_to_tune(turns: GpuTurns, device: str) -> Iterator[None]:
    """Reserve the GPU for this process, for as long as a kernel is tuned.

    First wait for all launched work. A collective ends only when the other rank has launched its part. That rank must
    not wait for the lock of its own GPU while another process waits for the lock of this one.
    """
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    with turns.alone():
        yield
