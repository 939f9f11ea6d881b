"""Write a run: one process at a time, a workload at a time, and so that nothing measured is lost.

Note [Full disk]: measuring a workload takes minutes, and its rows are a few MB at most. A writer therefore keeps a
reserve on the disk from before the first measurement, and gives it up when the disk is full, so that what was measured
can still be written. If even that does not help (a limit on the size of a file, a disk that has become read-only), rows
go to another file, which the next `--resume` takes in. Measuring stops either way.

Rows of a workload that is not through, on disk as they would be if the run ended now.

Note [Unfinished]: rows are final when their workload is through, which takes minutes. What was measured until then is
written every few seconds, after the blocks of each process and after metrics, to a file of its own that is replaced
as a whole. So not even SIGKILL loses more than the blocks of those seconds, or metrics that are being taken; Ctrl-C and
errors do not lose these either; if nothing was left to measure, they leave final rows. Each row says that it is
unfinished (`suite.results.schema.Shortage`); a mode that has failed has one, too, which says why. `--resume` measures
such a workload again from the beginning: its modes are alive together, and blocks of another start do not join them.
Unfinished rows stay until the new ones of these modes are final, or hold more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Protocol

from suite.results.errors import WrongUse
from suite.results.schema import Cell, Environment, Status
from suite.results.store import (
    CELLS,
    ENVIRONMENT,
    PACKED,
    RETRIED,
    UNFINISHED,
    CannotWrite,
    RecordedRun,
    describe,
    lines_of,
    make_folder,
    parse_lines,
    read_run,
    write_atomically,
    write_error,
)

UNSAVED = "unsaved-cells.jsonl"
"""Rows for which there was no room in `cells.jsonl`."""
NEXT_RETRIED = ".retried-next.jsonl"
"""The coming content of `retried.jsonl`, from before rows leave `cells.jsonl` until they have."""
LOCK = ".lock"
RESERVE = ".reserve"
RESERVE_BYTES = 16 * 2**20
"""More than the rows of any workload need."""


class RunIsBusy(WrongUse):
    """Report that another process writes this run."""


class RunWriter:
    """Write a run. It holds the run's lock, and its reserve of space, from `create` or `reopen` until it is closed; see
    Note [Full disk].
    """

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self._lock = lock
        self._full: CannotWrite | None = None
        self._unfinished: Sequence[Cell] = ()

    @classmethod
    def create(cls, path: Path, environment: Environment) -> RunWriter:
        """Start a run in a folder that does not exist, or is empty.

        Raises:
            WrongUse: the folder has something in it, or cannot be written to.
            CannotWrite: the disk is full.
        """
        if (path / ENVIRONMENT).exists():
            raise WrongUse(f"{describe(path)} is a run already; give --resume {describe(path)} to go on with it")
        if path.exists() and (not path.is_dir() or any(file.name != LOCK for file in path.iterdir())):
            raise WrongUse(f"{describe(path)} is not an empty folder; give --out another one")
        writer = cls(path, _locked(make_folder(path, "--out")))
        write_atomically(path / ENVIRONMENT, environment.model_dump_json(indent=2) + "\n")
        return writer

    @classmethod
    def reopen(cls, path: Path) -> tuple[RunWriter, RecordedRun]:
        """Open a run to go on with it.

        A last line that was cut short is moved to its own file; rows that a full disk left elsewhere are taken in. Rows
        of a workload that is not through stay until `append` or `keep_unfinished` replace them.

        Raises:
            RunIsBusy: another process writes this run.
            InvalidResults: its files are not of this schema.
            WrongUse: its rows are packed.
            CannotWrite: the disk is full.
        """
        if (path / PACKED).exists():
            raise WrongUse(f"{describe(path)} is packed; `gunzip {describe(path / PACKED)}`, then go on with it")
        writer = cls(path, _locked(path))
        try:
            run = read_run(path)
            if run.cut_line is not None:
                _move_cut_line(path, run.cut_line)
            _end_setting_aside(path, run.cells)
            cut_line = run.cut_line
            if writer._take_in_unsaved(run.cells):
                run = replace(read_run(path), cut_line=cut_line)
            writer._unfinished = run.unfinished
            for remains in path.glob(f".{UNFINISHED}.*"):  # of one that was killed while it wrote
                remains.unlink(missing_ok=True)
        except BaseException:
            writer.close()
            raise
        return writer, run

    def append(self, *cells: Cell) -> None:
        """Add cells, a line each, with one write and syncs them to disk: an interrupt finds all of a workload's rows
        there, or none. After rows were saved elsewhere, because the disk is full or nothing may be written there any
        more, `check_space` raises.

        Raises:
            CannotWrite: the disk is full and the rows could be written nowhere; the file is as it was before.
            OSError: nothing may be written, there or elsewhere.
        """
        lines = lines_of(cells).encode()
        try:
            _append_lines(self.path / CELLS, lines)
        except (CannotWrite, OSError) as error:
            self._give_up_reserve()
            self._full = self._saved(lines, error)
        else:
            self._forget_unfinished(cells)

    def keep_unfinished(self, rows: Sequence[Cell], *, last: bool = False) -> bool:
        """Write the rows of a workload that is not through, in place of those that were written of it before; return
        whether something of it is there now. Rows of an earlier start of the run stay for as long as they hold more; so
        do those of modes that are not measured now.

        The reserve is for rows that are final. Only the `last` call, after which the run ends, may use it.
        """
        if last:
            self._give_up_reserve()
        modes = {row.key for row in rows}
        # Modes of one group are compared as having alternated: those of two starts must not stand side by side.
        groups = {(*row.key[:3], row.grouping, *row.group) for row in rows}
        older = [
            row for row in self._unfinished if row.key in modes or (*row.key[:3], row.grouping, *row.group) in groups
        ]
        if _held(older) > _held(rows):
            return True
        replaced = {row.key for row in older}
        others = [row for row in self._unfinished if row.key not in replaced]
        with contextlib.suppress(OSError, CannotWrite):
            write_atomically(self.path / UNFINISHED, lines_of([*others, *rows]))
            return True
        return False

    def _give_up_reserve(self) -> None:
        """Give up the reserve, where files may still be changed; elsewhere it stays, and there is something else to
        say."""
        with contextlib.suppress(OSError):
            (self.path / RESERVE).unlink(missing_ok=True)

    def _forget_unfinished(self, final: Sequence[Cell]) -> None:
        """Remove unfinished rows of these cells. Readers overlook what stays, for these cells have final rows."""
        done = {cell.key for cell in final}
        self._unfinished = [row for row in self._unfinished if row.key not in done]
        path = self.path / UNFINISHED
        with contextlib.suppress(OSError, CannotWrite):
            if self._unfinished:
                write_atomically(path, lines_of(self._unfinished))
            else:
                path.unlink(missing_ok=True)

    def _saved(self, lines: bytes, error: CannotWrite | OSError) -> CannotWrite:
        """Write lines for which there was no room wherever there is some; return what to say about it."""
        elsewhere = Path(tempfile.gettempdir()) / f"encore-{self.path.resolve().name}-{UNSAVED}"
        for path in (self.path / CELLS, self.path / UNSAVED, elsewhere):
            with contextlib.suppress(OSError, CannotWrite):
                _append_lines(path, lines)
                why = "the disk is full" if isinstance(error, CannotWrite) else error.strerror
                if path != elsewhere:
                    again = f"`encore run --resume {describe(self.path)}`"
                    told = f"cannot write {describe(self.path)}: {why}. What was measured is there; go on with {again}."
                    return self._full or (error if isinstance(error, CannotWrite) else CannotWrite(told))
                return CannotWrite(
                    f"cannot write to {describe(self.path)}: {why}. What was measured is in {elsewhere}; "
                    f"make room, move that file to {describe(self.path / UNSAVED)}, then go on with "
                    f"`encore run --resume {describe(self.path)}`."
                )
        raise error

    def check_space(self) -> None:
        """Check that the rows of one more workload can be written.

        Raises:
            CannotWrite: the disk is full, or was when the last row was written; what was measured is saved.
        """
        if self._full is not None:
            raise self._full
        path = self.path / RESERVE
        try:
            with path.open("ab") as file:
                if file.tell() < RESERVE_BYTES:
                    os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # else the file system, or a limit, allows no reserve
                raise write_error(path, error) from error

    def _take_in_unsaved(self, cells: Sequence[Cell]) -> bool:
        """Move the rows of `UNSAVED` to where they belong; return whether there were any."""
        path = self.path / UNSAVED
        if not path.exists():
            return False
        known = {cell.key for cell in cells}
        # A cell stands there twice if it was measured again before the file was moved here; the later row counts.
        rows = {row.key: row for row in parse_lines(path) if row.key not in known}
        write_atomically(self.path / CELLS, lines_of([*cells, *rows.values()]))
        path.unlink()
        return True

    def set_aside(self, cells: Sequence[Cell], again: Callable[[Cell], bool]) -> list[Cell]:
        """Move the lines of those cells of the run that are to run again to `retried.jsonl`; return the others.

        Wherever it is killed, `reopen` finds each line in one of the two files.
        """
        moved = [cell for cell in cells if again(cell)]
        kept = [cell for cell in cells if not again(cell)]
        if moved:
            retried = self.path / RETRIED
            before = retried.read_text(encoding="utf-8") if retried.exists() else ""
            write_atomically(self.path / NEXT_RETRIED, before + lines_of(moved))
            write_atomically(self.path / CELLS, lines_of(kept))
            _end_setting_aside(self.path, kept)
        return kept

    def close(self) -> None:
        self._give_up_reserve()
        self._lock.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _held(rows: Sequence[Cell]) -> tuple[int, int, int]:
    """Return how much unfinished rows of a workload hold: processes, metrics, blocks; the first weighs most. A failure
    holds nothing."""
    rows = [row for row in rows if row.status is Status.PASS]
    return (
        sum(row.processes for row in rows),
        sum(row.metrics is not None for row in rows),
        sum(len(row.blocks) for row in rows),
    )


def _append_lines(path: Path, lines: bytes) -> None:
    """Add lines to a file with one write and sync it.

    Raises:
        CannotWrite: the disk is full; the file is as it was before.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, lines) != len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, size)
            if size == 0:
                path.unlink(missing_ok=True)
            raise write_error(path, error) from error
    finally:
        os.close(descriptor)


def _locked(run: Path) -> IO[bytes]:
    try:
        lock = (run / LOCK).open("ab")
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise WrongUse(
            f"{describe(run)}: nothing may be written there ({error.strerror}); copy it to a writable "
            "folder, and go on with the copy"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise RunIsBusy(
            f"{describe(run)} is being written by another `encore run`; wait for it, or start another run"
        ) from None
    return lock


def _move_cut_line(run: Path, cut_line: bytes) -> None:
    """Keep the remains of a cut line to look at, then cut them off. In this order: a crash between loses nothing."""
    _unused(run / "cells.cut-line.txt").write_bytes(cut_line)
    with (run / CELLS).open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - len(cut_line))
        os.fsync(file.fileno())


def _end_setting_aside(run: Path, cells: Sequence[Cell]) -> None:
    """Finish what `RunWriter.set_aside` has begun, if rows have left `cells.jsonl`; else it has not begun."""
    waiting = run / NEXT_RETRIED
    if not waiting.exists():
        return
    if parse_lines(waiting)[-1].key in {cell.key for cell in cells}:
        waiting.unlink()
    else:
        waiting.replace(run / RETRIED)


def _unused(path: Path) -> Path:
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_stem(f"{path.stem}-{number}"), number + 1
    return candidate


EVERY_S = 10.0
"""Seconds from one write to the next while blocks are measured: writing disturbs the host."""


class Rows(Protocol):
    """Define modes that are measured together: `suite.run.runner`."""

    through: bool

    def final(self) -> Mapping[str, Cell]: ...

    def unfinished(self) -> Sequence[Cell]: ...


class UnfinishedRows:
    """Keep the rows of the workload that is being measured, group by group, and the run that they are written to."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._groups: list[Rows] = []
        self._written = time.monotonic()

    def add(self, group: Rows) -> None:
        """Add one more group: of modes that no other group has rows of."""
        self._groups.append(group)

    def now_and_then(self, first: Callable[[], None] = lambda: None) -> None:
        """Write the rows if it is time; called between blocks. `first` is called before rows are written."""
        if time.monotonic() >= self._written + EVERY_S:
            first()
            self.keep()

    def keep(self, *, last: bool = False) -> tuple[Sequence[Cell], bool]:
        """Write the rows; return them, and whether they, or older ones that hold more, are on disk. `last`: the run
        ends with this."""
        rows = [row for group in self._groups for row in group.unfinished()]
        kept = bool(rows) and self._writer.keep_unfinished(rows, last=last)
        self._written = time.monotonic()
        return rows, kept

    def final(self) -> dict[str, Cell]:
        """Return rows by mode, of groups that are through."""
        return {name: row for group in self._groups if group.through for name, row in group.final().items()}
