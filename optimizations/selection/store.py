"""Verdicts on disk: a folder with one file per graph and circumstances, named by their digest.

Files are written atomically, so processes may share the folder: a reader finds a whole verdict or none. Two processes
that measure the same graph both write; the later one stays, and either is right. Where inputs move in one and rest in
the other, each has a file of its own. A file that is damaged, of another version, or of other circumstances than its
name says is left alone and counts for nothing; why is logged, and listed by `encore decisions`.

A verdict on several graphs together is one file for each, which name one another. It counts only if all are there and
agree: a process may end between two of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from optimizations.atomic_file import write_atomically
from optimizations.selection.verdict import Circumstances, StoredVerdict, UnreadableVerdict, parse_verdict
from optimizations.user_cache import user_cache

SUFFIX = ".verdict.json"
MOST_BYTES = 1 << 20
"""A larger file is no verdict, and is not read."""

ALONE = "a graph that it was judged together with has no such verdict"

STRAY = f"it is not named as verdicts are (*{SUFFIX}); nothing reads or removes it"
CUT_OFF = "it is being written, or its program ended while it was; `encore decisions clear --all` removes it"
"""Of what is in the folder and not listed among verdicts."""

MOST_TOLD = 1000
"""Things that are told in one process."""

LONGEST_REASON = 300
"""Characters of why a file is ignored: it may quote the file, and a file may hold anything."""

_NAME = re.compile(r"[0-9a-f]{64}")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A file of the folder: its verdict, or why it is ignored."""

    path: Path
    verdict: StoredVerdict | None
    ignored: str | None

    @property
    def key(self) -> str:
        """What the file is named by."""
        return self.path.name.removesuffix(SUFFIX)


_Together = tuple[Circumstances, tuple[str, ...], str]


def _together(verdict: StoredVerdict) -> _Together:
    """What is the same in verdicts on graphs that were judged together."""
    return verdict.circumstances.model_copy(update={"graph": ""}), verdict.group, verdict.kept


def default_directory() -> Path:
    """`$ENCORE_CACHE_DIR/verdicts`, else `encore/verdicts` in the user's cache folder."""
    chosen = os.environ.get("ENCORE_CACHE_DIR")
    # A program may change its folder before a verdict is reached.
    return (Path(chosen) / "verdicts" if chosen else user_cache() / "verdicts").absolute()


def key_of(circumstances: Circumstances) -> str:
    """The name of the verdict for these circumstances."""
    return hashlib.sha256(json.dumps(circumstances.model_dump(), sort_keys=True).encode()).hexdigest()


class VerdictStore:
    """A folder of verdicts, which may not be there yet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Groups whose files are all there and agree: hundreds of graphs of one would look at each other's.
        self._whole: set[_Together] = set()

    def get(self, circumstances: Circumstances) -> StoredVerdict | None:
        """The verdict for these circumstances; None where there is none that counts."""
        found = self._read(self._path(key_of(circumstances)))
        if found.verdict is None:
            if found.ignored is not None:
                _tell_once("%s is ignored: %s", found.path, found.ignored)
            return None
        whole = _together(found.verdict)
        if whole in self._whole:
            return found.verdict
        for other in found.verdict.group:
            if other == found.verdict.circumstances.graph:
                continue
            neighbour = self._read(self._path(key_of(circumstances.model_copy(update={"graph": other})))).verdict
            if neighbour is None or _together(neighbour) != whole:
                _tell_once("%s is ignored: %s", found.path, ALONE)
                return None
        self._whole.add(whole)
        return found.verdict

    def put(self, verdicts: Sequence[StoredVerdict]) -> str | None:
        """Store the verdicts of graphs that were judged together. Why they could not be; None where they are.

        A folder that cannot be written, or a full disk, costs measuring again.
        """
        self._whole.clear()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for verdict in verdicts:
                write_atomically(self._path(key_of(verdict.circumstances)), verdict.to_json())
        except OSError as error:
            reason = f"{type(error).__name__}: {error.strerror or error}"
            _tell_once("cannot store verdicts in %s: %s", self.directory, reason)
            return reason
        return None

    def list(self) -> tuple[Found, ...]:
        """Every file of the folder that is named as verdicts are, oldest first.

        Raises:
            OSError: the folder is there and cannot be read.
        """
        found = [self._read(path) for path in sorted(self._files(), key=_age)]
        there: dict[_Together, set[str]] = {}
        for one in found:
            if one.verdict is not None:
                there.setdefault(_together(one.verdict), set()).add(one.verdict.circumstances.graph)
        return tuple(
            one
            if one.verdict is None or there[_together(one.verdict)].issuperset(one.verdict.group)
            else Found(one.path, None, ALONE)
            for one in found
        )

    def strays(self) -> tuple[Found, ...]:
        """What else lies in the folder, by name: `list` leaves it out, and `clear` leaves it alone, but for files that
        were being written when their program ended.

        Raises:
            OSError: the folder is there and cannot be read.
        """
        own = set(self._files())
        cut_off = set(self._cut_off())
        others = [path for path in self.directory.iterdir() if path not in own] if self.directory.is_dir() else []
        return tuple(Found(path, None, CUT_OFF if path in cut_off else STRAY) for path in sorted(others))

    def clear(self, keys: Sequence[str] | None = None) -> int:
        """Remove these verdicts, by default all, damaged ones and what a crash left behind too. How many there were.

        Folders stay, whatever they are called.

        Raises:
            OSError: a file cannot be removed. All others are.
        """
        chosen = [path for path in self._files() if keys is None or path.name.removesuffix(SUFFIX) in keys]
        cut_off = self._cut_off() if keys is None else ()
        removed, failed = set(), None
        for path in (*chosen, *cut_off):
            try:
                path.unlink()
                removed.add(path)
            except (FileNotFoundError, IsADirectoryError):  # another process was faster, or it is none of ours
                continue
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return len(removed.intersection(chosen))

    def _files(self) -> Iterator[Path]:
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            if path.name.endswith(SUFFIX) and not path.name.startswith("."):
                yield path

    def _cut_off(self) -> Iterable[Path]:
        """What a program leaves that ends while it writes a verdict: see `write_atomically`."""
        return self.directory.glob(f".*{SUFFIX}.*") if self.directory.is_dir() else ()

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{SUFFIX}"

    def _read(self, path: Path) -> Found:
        key = path.name.removesuffix(SUFFIX)
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe would be waited for
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return Found(path, None, "it is not a regular file")
                content: bytes | None = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return Found(path, None, "it is a link to nothing" if path.is_symlink() else None)
        except OSError as error:
            return Found(path, None, f"it cannot be read ({error.strerror or error})")
        if content is None:  # a file of the kernel's, behind a link, that has nothing to say yet
            return Found(path, None, "it has nothing to read now")
        if len(content) > MOST_BYTES:
            return Found(path, None, f"it is larger than {MOST_BYTES} bytes")
        try:
            verdict = parse_verdict(content)
        except UnreadableVerdict as error:
            return Found(path, None, str(error)[:LONGEST_REASON])
        if not _NAME.fullmatch(key) or key_of(verdict.circumstances) != key:
            return Found(path, None, "it holds for other circumstances than its name says")
        if verdict.circumstances.graph not in verdict.group:
            return Found(path, None, "its group does not name its own graph")
        return Found(path, verdict, None)


def _tell_once(message: str, path: Path, reason: str) -> None:
    """A program of hundreds of graphs, or that compiles again and again, is not told of one folder in hundreds of
    lines."""
    if (told := (message, path, reason)) not in _TOLD and len(_TOLD) < MOST_TOLD:
        _TOLD.add(told)
        log.warning(message, path, reason)


_TOLD: set[tuple[str, Path, str]] = set()


def _age(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except OSError:
        return 0.0, path.name
