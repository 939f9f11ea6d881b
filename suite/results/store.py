"""Read runs on disk, a folder with `environment.json` and `cells.jsonl`, with checks, and write their files.

A line is appended with one write and synced when its cell is final, so that the file has only whole lines after any
end of the process. One process writes a run at a time. If a cell
(workload, variant, size, mode) was run again, the last line counts. `gzip -9n cells.jsonl` reduces a complete run to a
fifth of its size; it can then be read, but not continued.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import itertools
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from optimizations import atomic_file
from optimizations.uncollected import uncollected
from suite.results.errors import WrongUse, nearest
from suite.results.schema import SCHEMA_VERSION, Cell, Environment, Record

REPOSITORY = Path(__file__).resolve().parents[2]
RUNS = REPOSITORY / "results" / "runs"
RECORDED = REPOSITORY / "results" / "recorded"

ENVIRONMENT = "environment.json"
CELLS = "cells.jsonl"
PACKED = f"{CELLS}.gz"

_R = TypeVar("_R", bound=Record)


class InvalidResults(WrongUse):
    """Report a results file that does not match the schema; the message has the file and the line."""


@dataclass(frozen=True)
class RecordedRun:
    """Hold a run as read from disk."""

    path: Path
    environment: Environment
    cells: tuple[Cell, ...]

    def missing(self) -> list[tuple[str, str]]:
        """Return the planned (workload, mode) pairs without a line."""
        settings = self.environment.settings
        done = {(cell.workload, cell.mode) for cell in self.cells}
        workloads, modes = settings.get("workloads"), settings.get("modes")
        if not isinstance(workloads, list) or not isinstance(modes, list):
            return []
        return [(str(w), str(m)) for w in workloads for m in modes if (w, m) not in done]


def describe(path: Path) -> str:
    """Return the path for messages: relative to the working directory where that is shorter."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


_OTHER_VERSION = (
    f"The file was made by another version of Encore or edited; this one reads schema version {SCHEMA_VERSION}."
)


def _parse(kind: type[_R], text: bytes, place: str, advice: str = _OTHER_VERSION) -> _R:
    """Read a record.

    Raises:
        InvalidResults: it has other fields; the message has the place, the first wrong field, and `advice`.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise InvalidResults(f"{place} is damaged: {first['msg']}; restore it, or take it away") from error
        field = ".".join(map(str, first["loc"]))
        where = f"field {field!r}: " if field else ""
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise InvalidResults(f"{place}: {where}{first['msg']}{more}. {advice}") from error


def _check_version(record: Environment | Cell, place: str) -> None:
    if record.schema_version != SCHEMA_VERSION:
        raise InvalidResults(
            f"{place}: schema version {record.schema_version}, this Encore reads {SCHEMA_VERSION}; "
            "use the commit named in the run's environment.json"
        )


def read_environment(run: Path) -> Environment:
    """Return the `environment.json` of a run.

    Raises:
        InvalidResults: it is missing, or not of this schema.
    """
    path = run / ENVIRONMENT
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise InvalidResults(f"{describe(run)} is not a run: it has no {ENVIRONMENT}") from None
    environment = _parse(Environment, text, describe(path))
    _check_version(environment, describe(path))
    return environment


def read_run(run: Path) -> RecordedRun:
    """Return a run and all its cells, checked.

    Raises:
        InvalidResults: a file is missing or damaged, or a line is not of this schema.
    """
    environment = read_environment(run)
    path, text = _rows_of(run)
    return RecordedRun(run, environment, _checked_rows(path, text.removesuffix(b"\n")))


@uncollected()  # garbage collection would take four fifths of the time
def _checked_rows(path: Path, text: bytes) -> tuple[Cell, ...]:
    """Return the last row of each cell in these lines."""
    cells: dict[tuple[str, str, str, str], Cell] = {}
    for number, line in enumerate(text.split(b"\n") if text else (), start=1):
        place = f"{describe(path)} line {number}"
        cell = _parse(Cell, line, place)
        _check_version(cell, place)
        cells.pop(cell.key, None)
        cells[cell.key] = cell
    return tuple(cells.values())


def read_unpacked(path: Path) -> bytes:
    """Read a file, unpacked where its name ends in `.gz`.

    Raises:
        OSError: it cannot be read.
        InvalidResults: it is damaged.
    """
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    try:
        if not content:
            raise EOFError("it is empty")
        return gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidResults(f"{describe(path)} is damaged: {error}; restore it from where it was made") from error


def read_record(kind: type[_R], path: Path, what: str, advice: str) -> _R:
    """Read a file that holds one record, packed or not.

    Raises:
        OSError: it cannot be read.
        InvalidResults: it is no `what`; the message has the place, and `advice`.
    """
    return _parse(kind, read_unpacked(path), describe(path), f"It is no file of {what}; {advice}.")


def _rows_of(run: Path) -> tuple[Path, bytes]:
    """Return the file that holds a run's rows, and its text; empty where none is final yet."""
    plain, packed = run / CELLS, run / PACKED
    if plain.exists() and packed.exists():
        raise InvalidResults(f"{describe(run)} has both {CELLS} and {PACKED}; take away the one that is not to be read")
    path = packed if packed.exists() else plain
    return path, read_unpacked(path) if path.exists() else b""


def list_runs(folder: Path) -> list[Path]:
    """Return folders of runs, oldest first by creation time. Runs of another schema version are left out."""
    runs = []
    for path in folder.glob(f"*/{ENVIRONMENT}"):
        with contextlib.suppress(InvalidResults, OSError):
            runs.append((read_environment(path.parent).created_at, path.parent))
    return [run for _, run in sorted(runs)]


def newest_run(*folders: Path) -> Path | None:
    """Return the newest run of the first folder that has one."""
    for folder in folders:
        if runs := list_runs(folder):
            return runs[-1]
    return None


def find_run(name: str, folders: Sequence[Path] | None = None) -> Path:
    """Return the run of this name in the results folders, or at this path.

    Raises:
        WrongUse: there is none; the message names the nearest ones.
    """
    if not name:
        raise WrongUse("'' names no run; give a name in results/runs or results/recorded, or a folder")
    folders = (RUNS, RECORDED) if folders is None else folders
    for candidate in (*(folder / name for folder in folders), Path(name)):
        if (candidate / ENVIRONMENT).is_file():
            return candidate
    known = [path.parent.name for folder in folders for path in sorted(folder.glob(f"*/{ENVIRONMENT}"))]
    where = f"; the folder has no {ENVIRONMENT}" if Path(name).is_dir() else ""
    if Path(name).is_file():
        where = "; this is a file, give the folder of the run that it is in"
    known_names = "a run is a name in results/runs or results/recorded, or a folder"
    raise WrongUse(f"unknown run {name!r}{where}; {nearest(name, known, 0.4)} ({known_names})")


def make_folder(path: Path) -> Path:
    """Return a folder that can be written to, and create it if needed.

    Raises:
        OSError: a file with this name exists, or the folder is not writable.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


def new_folder(parent: Path, name: str) -> Path:
    """Create and return a folder of this name, with a suffix "-2", "-3" and so on if it exists.

    So two commands that start in the same second use separate folders.

    Raises:
        OSError: `parent` is not writable.
    """
    make_folder(parent)
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("numbers do not end")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically, and create its folder: after a crash it has the old or the new content, never a part.

    Raises:
        OSError: the file cannot be written; the old content is intact.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        atomic_file.write_atomically(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        error.filename = str(path)  # it may name a temporary file
        raise


def lines_of(cells: Iterable[Cell]) -> str:
    """Return the text of a `cells.jsonl` with these cells."""
    return "".join(cell.model_dump_json() + "\n" for cell in cells)
