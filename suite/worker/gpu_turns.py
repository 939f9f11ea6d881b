"""Take turns on a GPU that several processes use: many may call a program, and one may have the GPU for itself.

A lock on a file, so that a process that is killed gives its turn back.

A process has one place among those of its workload, also while a kernel is tuned. Imports torch where it is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

MOST_WAIT_S = 120.0
"""A process that hangs in its turn must not end the others with it: after so long they go on without one."""

_POLL_S = 0.005


class GpuTurns:
    """Keep this process's place among those that use the GPU of `file`. Not for several threads at once.

    Attributes:
        waited_s: seconds that this process has waited for its turns, in all; to be set back by who asks.
    """

    def __init__(
        self, file: Path, waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> None:
        """Open the file of turns. `waiting()` surrounds each wait."""
        self.waited_s = 0.0
        self._waiting = waiting
        file.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._held = fcntl.LOCK_UN

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Run the block next to other processes that call, while none has the GPU for itself."""
        with self._turn(fcntl.LOCK_SH):
            yield

    @contextmanager
    def alone(self, most_wait_s: float | None = None) -> Iterator[None]:
        """Run the block while no other process calls. A turn of `calling` is given back, and taken again at the end.

        `most_wait_s`: for who may wait longer than `MOST_WAIT_S`, seconds.
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
        """Take another kind of turn. What was held is given back first, or two processes would wait for each other for
        ever."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._held = fcntl.LOCK_UN
        if kind == self._held or self._gets(kind):
            return
        most_s = MOST_WAIT_S if most_wait_s is None else most_wait_s
        begin = time.monotonic()
        with self._waiting():
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
"""The file in the cache folder by which a workload's processes share the GPU."""


@cache
def turns_of(file: Path) -> GpuTurns:
    """Return one place for a process: it would wait for itself with two of them, and cells that follow one another tune
    by the first one's."""
    from suite.measure.compile_times import untimed

    return GpuTurns(file, untimed)


@contextmanager
def alone_to_tune(turns: GpuTurns, device: str) -> Iterator[None]:
    """Reserve the GPU for this process, for as long as a kernel is tuned.

    What this process has launched is waited for before. It may be a collective, which ends when another rank has
    launched its part; and that rank must not wait for the turn on its own GPU of a process whose neighbour waits for
    the turn on this one.
    """
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    with turns.alone():
        yield
