"""Clean up after this process by one that outlives it, so that not even `kill -9` leaves workers or folders behind.

Note [Guard]: what a program starts it ends, and folders it made for itself it removes, in a `finally`. SIGKILL, which
is also the kernel's answer to a lack of memory, leaves no time for that. The first worker or temporary folder therefore
starts a guard: a small process in its own session that reads from a pipe which only this program can write to.
When the pipe ends, the program is gone; the guard then kills every process that carries this program's mark and removes
the folders that were not given back.

This file is also run as a script, by the guard. It imports the standard library only, so that a guard starts in a few
hundredths of a second.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = "ENCORE_WORKER"
"""The environment variable that every worker has, and whatever it starts inherits."""

KILL_ROUNDS = 5
KILL_WAIT_S = 3.0

RUN_MARK = secrets.token_hex(8)
"""Beginning of the marks of this program's workers."""

_numbers = itertools.count()
_lock = threading.Lock()
_pipe_fd: int | None = None
_process_id: int | None = None


def process_id() -> int | None:
    """Return the id of the guard's process, if there is one."""
    return _process_id


def new_mark() -> str:
    """Return a mark for one worker. From the first one on a guard watches this program."""
    with _lock:
        _started()
    return f"{RUN_MARK}.{next(_numbers)}"


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder that is gone when the block ends, or when this program does, however it ends."""
    folder = make_folder(prefix)
    try:
        yield folder
    finally:
        remove_folder(folder)


def make_folder(prefix: str) -> Path:
    """Make a folder that is gone after `remove_folder`, or when this program ends, however it ends."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    _tell({"made": str(folder)})
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a folder of `make_folder` with all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    _tell({"removed": str(folder)})


def kill_marked(wanted: Callable[[str], bool]) -> None:
    """Kill processes whose mark is wanted, and return when none is left.

    Looks again until none is found, for a process may have started another one meanwhile; only so often, because one
    that hangs in a driver call does not die.
    """
    for _ in range(KILL_ROUNDS):
        found = list(_marked(wanted))
        if not found:
            return
        try:
            for descriptor in found:
                with suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            _await_end(found)
        finally:
            for descriptor in found:
                os.close(descriptor)


def _marked(wanted: Callable[[str], bool]) -> Iterator[int]:
    """Yield descriptors of the processes with such a mark. A zombie has no environment, and so no mark."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # Opened before its environment is read, so that the number cannot pass to another process in between.
        with suppress(OSError):
            descriptor = os.pidfd_open(int(entry.name))
            try:
                chosen = wanted(_mark_of(entry))
            except BaseException:
                os.close(descriptor)
                raise
            if chosen:
                yield descriptor
            else:
                os.close(descriptor)


def _mark_of(process: Path) -> str:
    name = MARK.encode() + b"="
    for variable in (process / "environ").read_bytes().split(b"\0"):
        if variable.startswith(name):
            return variable.removeprefix(name).decode(errors="replace")
    return ""


def _await_end(descriptors: Sequence[int]) -> None:
    """Wait until these processes have ended, at most `KILL_WAIT_S`."""
    deadline = time.monotonic() + KILL_WAIT_S
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)  # a process that ends makes it readable
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)


def _started() -> int:
    """Return the descriptor on which the guard listens; start the guard if there is none."""
    global _pipe_fd, _process_id
    if _pipe_fd is None:
        read, write = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, RUN_MARK],
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        except BaseException:
            os.close(write)
            raise
        finally:
            os.close(read)
        _pipe_fd, _process_id = write, process.pid
    return _pipe_fd


def _tell(message: dict[str, str]) -> None:
    """Send the guard a message. If the guard was killed, everything but the clean-up after a SIGKILL still works."""
    with _lock, suppress(BrokenPipeError):
        os.write(_started(), json.dumps(message).encode() + b"\n")


def _watch(run_mark: str) -> None:
    """Run the guard itself: listen until the program it watches is gone, then clean up after it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folders: set[str] = set()
    for line in sys.stdin.buffer:
        message = json.loads(line)
        folders |= {message["made"]} if "made" in message else set()
        folders -= {message.get("removed")}
    kill_marked(lambda mark: mark.startswith(run_mark))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _watch(sys.argv[1])
