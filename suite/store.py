"""Runs on disk: a folder with `environment.json` and `cells.jsonl`, read with checks and written line by line.

A line is appended with one write and synced when its cell is final, so that whatever ends the process leaves whole
lines behind; a last line cut short (power loss) is moved to a file beside it. One process writes a run at a time.
Every key (workload, variant, size, mode) stands in a file once; a failed cell that is to be run again moves to
`retried.jsonl` first.

Note [Full disk]: measuring a workload takes minutes, and its rows are a few MB at most. A writer therefore keeps a
reserve on the disk from before the first measurement, and gives it up when the disk is full, so that what was measured
can still be written. If even that does not help (a limit on the size of a file), rows go to another file, which the
next `--resume` takes in. Measuring stops either way.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeVar

from pydantic import ValidationError

from optimizations import atomic_file
from suite.errors import EncoreError, WrongUse
from suite.schema import READABLE_VERSIONS, Cell, Environment, Record

REPOSITORY = Path(__file__).resolve().parents[1]
RUNS = REPOSITORY / "results" / "runs"
RECORDED = REPOSITORY / "results" / "recorded"

ENVIRONMENT = "environment.json"
CELLS = "cells.jsonl"
RETRIED = "retried.jsonl"
UNSAVED = "unsaved-cells.jsonl"
"""Rows for which there was no room in `cells.jsonl`."""
LOCK = ".lock"
RESERVE = ".reserve"
RESERVE_BYTES = 16 * 2**20
"""More than the rows of any workload need."""

_READABLE = " and ".join(map(str, READABLE_VERSIONS))

_R = TypeVar("_R", bound=Record)


class InvalidResults(WrongUse):
    """A results file that is not what the schema says; the message has the file and the line."""


class RunIsBusy(WrongUse):
    """Another process writes this run."""


class CannotWrite(EncoreError):
    """The disk is full, or a quota reached. What was written before is intact."""


@dataclass(frozen=True)
class RecordedRun:
    """A run as read from disk. `cut_line` is a last line without its end, left out of `cells`."""

    path: Path
    environment: Environment
    cells: tuple[Cell, ...]
    cut_line: bytes | None

    def missing(self) -> list[tuple[str, str]]:
        """(workload, mode) pairs the run set out to measure and has no line for."""
        settings = self.environment.settings
        done = {(cell.workload, cell.mode) for cell in self.cells}
        workloads, modes = settings.get("workloads"), settings.get("modes")
        if not isinstance(workloads, list) or not isinstance(modes, list):
            return []
        return [(str(w), str(m)) for w in workloads for m in modes if (w, m) not in done]


def describe(path: Path) -> str:
    """The path as it is shown to a user: relative to the working directory where that is shorter."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _parse(kind: type[_R], text: bytes, place: str) -> _R:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise InvalidResults(
            f"{place}: {f'field {where!r}: ' if where else ''}{first['msg']}{more}. The file was made by another "
            f"version of Encore or edited; this one reads schema versions {_READABLE}."
        ) from error


def _check_version(record: Environment | Cell, place: str) -> None:
    if record.schema_version not in READABLE_VERSIONS:
        raise InvalidResults(
            f"{place}: schema version {record.schema_version}, this Encore reads {_READABLE}; "
            "use the commit named in the run's environment.json"
        )


def read_environment(run: Path) -> Environment:
    """`environment.json` of a run.

    Raises:
        InvalidResults: it is missing, or not of this schema.
    """
    path = run / ENVIRONMENT
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise InvalidResults(f"{describe(run)} is no run: it has no {ENVIRONMENT}") from None
    environment = _parse(Environment, text, describe(path))
    _check_version(environment, describe(path))
    return environment


def read_run(run: Path) -> RecordedRun:
    """A run and all its cells, checked. A last line that was cut short is left out and reported in `cut_line`.

    Raises:
        InvalidResults: a file is missing, a line is not of this schema, or a cell is there twice.
    """
    environment = read_environment(run)
    path = run / CELLS
    text = path.read_bytes() if path.exists() else b""
    whole, _, rest = text.rpartition(b"\n")
    cells: dict[tuple[str, str, str, str], Cell] = {}
    for number, line in enumerate(whole.split(b"\n") if whole else (), start=1):
        place = f"{describe(path)} line {number}"
        cell = _parse(Cell, line, place)
        _check_version(cell, place)
        if cell.key in cells:
            raise InvalidResults(f"{place}: {'/'.join(cell.key)} is in the file already; each cell may be there once")
        _check_blocks(cell, place)
        cells[cell.key] = cell
    return RecordedRun(run, environment, tuple(cells.values()), rest or None)


def _check_blocks(cell: Cell, place: str) -> None:
    """Refuses two blocks of one index: readers find the block that alternated with another one by its index."""
    for blocks in (cell.blocks, *cell.baseline_blocks.values()):
        seen = set()
        for block in blocks:
            number = (getattr(block, "process", None), block.index)
            if number in seen:
                raise InvalidResults(
                    f"{place}: {'/'.join(cell.key)} has two blocks of index {block.index}; each may be there once"
                )
            seen.add(number)


def read_retried(run: Path) -> tuple[Cell, ...]:
    """Rows of failed cells that were run again since, oldest first; none where no cell was.

    Raises:
        InvalidResults: a line is not of this schema.
    """
    path = run / RETRIED
    lines = path.read_bytes().splitlines() if path.exists() else []
    return tuple(_parse(Cell, line, f"{describe(path)} line {n}") for n, line in enumerate(lines, start=1))


def list_runs(folder: Path) -> list[Path]:
    """Folders of runs, oldest first by creation time. Runs of another schema version are left out."""
    runs = []
    for path in folder.glob(f"*/{ENVIRONMENT}"):
        with contextlib.suppress(InvalidResults):
            runs.append((read_environment(path.parent).created_at, path.parent))
    return [run for _, run in sorted(runs)]


def newest_run(*folders: Path) -> Path | None:
    """The newest run of the first folder that has one."""
    for folder in folders:
        if runs := list_runs(folder):
            return runs[-1]
    return None


def find_run(name: str, folders: Sequence[Path] | None = None) -> Path:
    """The run of this name in the results folders, or at this path.

    Raises:
        WrongUse: there is none; the message names the nearest ones.
    """
    folders = (RUNS, RECORDED) if folders is None else folders
    for candidate in (*(folder / name for folder in folders), Path(name)):
        if (candidate / ENVIRONMENT).is_file():
            return candidate
    known = [path.parent.name for folder in folders for path in sorted(folder.glob(f"*/{ENVIRONMENT}"))]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known[-5:]) or 'none yet'}"
    raise WrongUse(f"unknown run {name!r}; {hint} (a run is a name in results/runs or results/recorded, or a folder)")


def make_folder(path: Path, option: str) -> Path:
    """The folder that an option names, made if it is not there.

    Raises:
        WrongUse: a file is in the way, or nothing may be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise WrongUse(f"{option} {path}: a file is in the way; give a folder") from error
    except (PermissionError, OSError) as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOENT):
            raise
        raise WrongUse(f"{option} {path}: {error.strerror}; give a folder that can be written to") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise WrongUse(f"{option} {path}: nothing may be written there; give another folder")
    return path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file, and its folder, so that a reader or a crash sees the old content or the new, never a part.

    Raises:
        CannotWrite: the disk is full; the old content is intact.
        WrongUse: a file stands where the folder should be.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise WrongUse(f"{describe(path.parent)}: a file is in the way; give a folder") from error
    try:
        atomic_file.write_atomically(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: Path, error: OSError) -> OSError | CannotWrite:
    """The error to raise for one met when writing a file of a run: a full disk says what to do."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return error
    return CannotWrite(
        f"cannot write {describe(path)}: {error.strerror}. What was measured before is intact; "
        f"make room, then go on with `encore run --resume {describe(path.parent)}`."
    )


class RunWriter:
    """A run that is being written. Holds the run's lock, and its reserve of space, from `create` or `reopen` until it
    is closed; see Note [Full disk].
    """

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self._lock = lock
        self._full: CannotWrite | None = None

    @classmethod
    def create(cls, path: Path, environment: Environment) -> RunWriter:
        """Starts a run in a folder that does not exist, or is empty.

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
        """Opens a run to go on with it.

        A last line that was cut short is moved to a file of its own; rows that a full disk left elsewhere are taken in.

        Raises:
            RunIsBusy: another process writes this run.
            InvalidResults: its files are not of this schema.
            CannotWrite: the disk is full.
        """
        writer = cls(path, _locked(path))
        try:
            run = read_run(path)
            if run.cut_line is not None:
                _move_cut_line(path, run.cut_line)
            cut_line = run.cut_line
            if writer._take_in_unsaved(run.cells):
                run = replace(read_run(path), cut_line=cut_line)
        except BaseException:
            writer.close()
            raise
        return writer, run

    def append(self, cell: Cell) -> None:
        """Adds a cell as one line and syncs it to disk. After rows were saved with a full disk, `check_space` raises.

        Raises:
            CannotWrite: the disk is full and the row could be written nowhere; the file is as it was before.
        """
        line = cell.model_dump_json().encode() + b"\n"
        path = self.path / CELLS
        try:
            _append_line(path, line)
        except CannotWrite as error:
            (self.path / RESERVE).unlink(missing_ok=True)
            self._full = self._saved(line, error)

    def _saved(self, line: bytes, error: CannotWrite) -> CannotWrite:
        """Writes a line for which there was no room wherever there is some; returns what to say about it."""
        elsewhere = Path(tempfile.gettempdir()) / f"encore-{self.path.resolve().name}-{UNSAVED}"
        for path in (self.path / CELLS, self.path / UNSAVED, elsewhere):
            with contextlib.suppress(OSError, CannotWrite):
                _append_line(path, line)
                if path != elsewhere:
                    return self._full or error
                return CannotWrite(
                    f"cannot write to {describe(self.path)}: the disk is full. What was measured is in {elsewhere}; "
                    f"make room, move that file to {describe(self.path / UNSAVED)}, then go on with "
                    f"`encore run --resume {describe(self.path)}`."
                )
        raise error

    def check_space(self) -> None:
        """Makes sure that the rows of one more workload can be written.

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
        """Moves the rows of `UNSAVED` to where they belong; whether there were any."""
        path = self.path / UNSAVED
        if not path.exists():
            return False
        known = {cell.key for cell in cells}
        lines = path.read_bytes().splitlines()
        rows = [_parse(Cell, line, f"{describe(path)} line {n}") for n, line in enumerate(lines, start=1)]
        write_atomically(self.path / CELLS, lines_of([*cells, *(row for row in rows if row.key not in known)]))
        path.unlink()
        return True

    def set_aside(self, cells: Sequence[Cell], again: Callable[[Cell], bool]) -> list[Cell]:
        """Moves the lines of those cells of the run that are to run again to `retried.jsonl`; returns the others."""
        moved = [cell for cell in cells if again(cell)]
        kept = [cell for cell in cells if not again(cell)]
        if moved:
            retried = self.path / RETRIED
            before = retried.read_text(encoding="utf-8") if retried.exists() else ""
            write_atomically(retried, before + lines_of(moved))
            write_atomically(self.path / CELLS, lines_of(kept))
        return kept

    def close(self) -> None:
        (self.path / RESERVE).unlink(missing_ok=True)
        self._lock.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def lines_of(cells: Iterable[Cell]) -> str:
    """The text of a `cells.jsonl` with these cells."""
    return "".join(cell.model_dump_json() + "\n" for cell in cells)


def _append_line(path: Path, line: bytes) -> None:
    """Adds a line to a file with one write and syncs it.

    Raises:
        CannotWrite: the disk is full; the file is as it was before.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, line) != len(line):
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
    lock = (run / LOCK).open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise RunIsBusy(
            f"{describe(run)} is being written by another `encore run`; wait for it, or start a run of its own"
        ) from None
    return lock


def _move_cut_line(run: Path, cut_line: bytes) -> None:
    """Keeps the remains for whoever wants to look, then cuts them off. In this order: a crash between loses nothing."""
    _unused(run / "cells.cut-line.txt").write_bytes(cut_line)
    with (run / CELLS).open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - len(cut_line))
        os.fsync(file.fileno())


def _unused(path: Path) -> Path:
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_stem(f"{path.stem}-{number}"), number + 1
    return candidate
