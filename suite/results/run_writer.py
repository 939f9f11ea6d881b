"""Write a run: by one process at a time, and all rows of a workload at once when it is complete.

If Ctrl-C, an error or a signal ends the run during a workload, this has no rows. `--resume` measures it from the
beginning: its modes are alive together, and blocks of a later start would not be interleaved with earlier ones.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

from suite.results.errors import WrongUse
from suite.results.schema import Cell, Environment
from suite.results.store import (
    CELLS,
    ENVIRONMENT,
    PACKED,
    RecordedRun,
    describe,
    lines_of,
    make_folder,
    read_run,
    write_atomically,
)

LOCK = ".lock"


class RunWriter:
    """Write a run. The run is locked from `create` or `reopen` until `close`."""

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, path: Path, environment: Environment) -> RunWriter:
        """Start a run in a folder that does not exist, or is empty.

        Raises:
            WrongUse: the folder is not empty.
            OSError: a file cannot be written.
        """
        if (path / ENVIRONMENT).exists():
            raise WrongUse(f"{describe(path)} is a run already; give --resume {describe(path)} to go on with it")
        if path.exists() and (not path.is_dir() or any(file.name != LOCK for file in path.iterdir())):
            raise WrongUse(f"{describe(path)} is not an empty folder; name another with --out")
        writer = cls(path, _locked(make_folder(path)))
        write_atomically(path / ENVIRONMENT, environment.model_dump_json(indent=2) + "\n")
        return writer

    @classmethod
    def reopen(cls, path: Path) -> tuple[RunWriter, RecordedRun]:
        """Open a run to continue it.

        Raises:
            WrongUse: another process writes this run, or its rows are packed.
            InvalidResults: its files are not of this schema.
            OSError: a file cannot be written.
        """
        if (path / PACKED).exists():
            raise WrongUse(f"{describe(path)} is packed; `gunzip {describe(path / PACKED)}`, then go on with it")
        writer = cls(path, _locked(path))
        try:
            return writer, read_run(path)
        except BaseException:
            writer.close()
            raise

    def append(self, *cells: Cell) -> None:
        """Add cells, a line each, with one write and sync, so that the file has all rows of a workload or none.

        Raises:
            OSError: a file cannot be written; the file is as it was before.
        """
        path, lines = self.path / CELLS, lines_of(cells).encode()
        with path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                if os.write(file.fileno(), lines) != len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError as error:
                os.ftruncate(file.fileno(), size)
                if size == 0:
                    path.unlink(missing_ok=True)
                error.filename = str(path)
                raise

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _locked(run: Path) -> IO[bytes]:
    lock = (run / LOCK).open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise WrongUse(
            f"{describe(run)} is being written by another `encore run`; wait for it, or start another run"
        ) from None
    return lock
