"""Order compilations: one mode of a workload compiles first, and the others follow it graph by graph.

Most of a compilation is Python's work, which modes can do side by side. What must not be done side by side comes at its
end: kernels are compiled, which would take each mode as many cores as there are, and Inductor times configurations of
them, which needs the GPU for itself. So one mode leads. The others get as far as the first kernel of a graph, and wait
there until the leader has launched its graph in that place: its kernels are compiled and tuned then, and are found.

The leader holds a lock on a file, in which it writes how many graphs it has launched. A leader that fails or is killed
gives the lock back, and no process waits for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from optimizations.torch_internals.generated_modules import before_kernels, when_launched
from suite.measure.compile_times import untimed

MOST_WAIT_S = 300.0
"""A leader that hangs must not end the others with it: after so long they go on by themselves."""

TRIAL = "order-of-trials"
REAL = "order"
"""Files in the folder that modes share, for the two compilations of a cell."""

_POLL_S = 0.005
_MOST_GRAPHS = 2**32 - 1
_BYTES = 4


class Place:
    """Tell whether a cell leads, follows or does neither, in each of its compilations.

    Args:
        folder: all cells that compile in this order have it.
        most_wait_s: how long it waits in each of its compilations at most.
    """

    def __init__(self, folder: Path, *, leads: bool, follows: bool, most_wait_s: float = MOST_WAIT_S) -> None:
        self._folder = folder
        self._most_wait_s = most_wait_s
        self._leads = leads
        self._follows = follows
        self._leaders: dict[str, Leader] = {}

    @contextlib.contextmanager
    def built(self) -> Iterator[None]:
        """Surround all that comes before the real compilation. The cell leads from here on, unless this fails."""
        if self._leads:
            self._leaders = {name: Leader(self._folder / name) for name in (TRIAL, REAL)}
        try:
            yield
        except BaseException:
            self._end(REAL)
            raise
        finally:
            self._end(TRIAL)

    @contextlib.contextmanager
    def first_call(self, name: str) -> Iterator[Follower]:
        """Surround the first call of what is compiled, by which `TRIAL` or `REAL` ends. Yields what it waited for."""
        follower = Follower(self._folder / name, self._most_wait_s)
        if leader := self._leaders.pop(name, None):
            with leader.leading():
                yield follower
        elif self._follows:
            with follower.following():
                yield follower
        else:
            yield follower

    def _end(self, name: str) -> None:
        if leader := self._leaders.pop(name, None):
            leader.end()


class Leader:
    """Lead from now on until `end`, or the end of this process. A workload has one leader."""

    def __init__(self, file: Path) -> None:
        self._descriptor = _opened(file)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # a follower that looks has it for a moment
        self._launched(0)

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Surround the first call of what is compiled, at whose end all graphs were launched: the others stop
        waiting."""
        try:
            with when_launched(self._launched):
                yield
        finally:
            self.end()

    def end(self) -> None:
        """Release the lock: no other process waits any more."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor too
        os.close(self._descriptor)

    def _launched(self, graphs: int) -> None:
        os.pwrite(self._descriptor, min(graphs, _MOST_GRAPHS).to_bytes(_BYTES, "little"), 0)


class Follower:
    """Follow the process that leads. `waited_s` is how long it has waited in all, which no timer of Dynamo's has."""

    def __init__(self, file: Path, most_wait_s: float) -> None:
        self.waited_s = 0.0
        self._file = file
        self._most_wait_s = most_wait_s

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Surround the first call of what is compiled."""
        descriptor = _opened(self._file)
        try:
            with before_kernels(lambda graphs: self._wait_for(descriptor, graphs)):
                yield
        finally:
            os.close(descriptor)

    def _wait_for(self, descriptor: int, graphs: int) -> None:
        """Wait until the leader has launched one graph more than `graphs`, or leads no more."""
        begin = time.monotonic()
        with untimed():
            while not _is_unlocked(descriptor) and int.from_bytes(os.pread(descriptor, _BYTES, 0), "little") <= graphs:
                if self.waited_s + time.monotonic() - begin > self._most_wait_s:
                    print(f"the mode that compiles first has not launched graph {graphs + 1}; going on without it")
                    break
                time.sleep(_POLL_S)
        self.waited_s += time.monotonic() - begin


def _opened(file: Path) -> int:
    file.parent.mkdir(parents=True, exist_ok=True)
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_unlocked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True
