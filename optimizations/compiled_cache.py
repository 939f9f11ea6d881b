"""Keep compiled code on disk, found by what was compiled, for what, by what, and how: cubins and Python modules.

An entry is one file, named by the SHA-256 of its key: a line of JSON with the compiler's log and a digest, then what
was compiled. Files are written atomically, so processes may share a folder. A file that does not match its digest is
built again. When the folder grows over its limit, the files that were not used for longest go.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from optimizations.atomic_file import write_atomically

FORMAT_VERSION = 1
DEFAULT_LIMIT_BYTES = 256 * 2**20
SUFFIX = ".cubin"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compiled:
    """Hold code, a cubin as a rule, and what the compiler said while making it."""

    image: bytes
    compiler_log: str


def user_cache() -> Path:
    """Return `$XDG_CACHE_HOME/encore`, else `~/.cache/encore`.

    A user without a home directory (a user id that the system does not know) gets a folder that this process owns and
    removes at its end: one in a place that others could guess would let them choose what is loaded.
    """
    chosen = os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen) / "encore"
    try:
        return Path.home() / ".cache" / "encore"
    except (RuntimeError, KeyError):
        return _of_this_process()


@functools.cache
def _of_this_process() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="encore-"))
    owner = os.getpid()

    def remove() -> None:
        # A forked child runs this too.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def default_directory(kind: str = "cubins") -> Path:
    """Return this kind's folder: `$ENCORE_CACHE_DIR/cubins`, else `encore/cubins` in the user's cache folder."""
    chosen = os.environ.get("ENCORE_CACHE_DIR")
    if chosen:
        return Path(chosen) / kind
    return user_cache() / kind


class CompiledCache:
    """Keep a folder of compiled code of at most `limit_bytes` (the entry just stored may exceed it alone)."""

    def __init__(self, directory: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES, suffix: str = SUFFIX) -> None:
        self.directory = directory
        self._suffix = suffix
        self.limit_bytes = limit_bytes

    def get_or_build(self, key: Sequence[str], build: Callable[[], Compiled]) -> Compiled:
        """Return the entry for `key`, or what `build` makes, which is then stored.

        A folder that cannot be written, or a full disk, costs the next build, not this one: it is logged. What `build`
        raises passes through, and nothing is stored.
        """
        path = self._path(key)
        found = _read(path)
        if found is not None:
            return found
        compiled = build()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(path, _encode(compiled))
            self._evict(keep=path)
        except OSError as error:
            log.warning("cannot store compiled code in %s: %s", self.directory, error)
        return compiled

    def _path(self, key: Sequence[str]) -> Path:
        return self.directory / f"{hashlib.sha256(json.dumps(list(key)).encode()).hexdigest()}{self._suffix}"

    def _evict(self, keep: Path) -> None:
        """Remove files, those unused for longest first, until the rest fits. A reader's hit renews a file's time."""
        files = []
        for path in self.directory.iterdir():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # another process removed it
            files.append((status.st_mtime_ns, path, status.st_size))
        total = sum(size for _, _, size in files)
        for _, path, size in sorted(files):
            if total <= self.limit_bytes:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size


def _digest(compiler_log: str, image: bytes) -> str:
    return hashlib.sha256(compiler_log.encode() + b"\0" + image).hexdigest()


def _encode(compiled: Compiled) -> bytes:
    header = {
        "format": FORMAT_VERSION,
        "digest": _digest(compiled.compiler_log, compiled.image),
        "compiler_log": compiled.compiler_log,
    }
    return json.dumps(header).encode() + b"\n" + compiled.image


def _read(path: Path) -> Compiled | None:
    """Return the entry at `path`; None where there is none or it is damaged."""
    try:
        header_line, _, image = path.read_bytes().partition(b"\n")
        os.utime(path)
    except OSError:
        return None
    try:
        header = json.loads(header_line)
        compiled = Compiled(image, header["compiler_log"])
        if header["format"] == FORMAT_VERSION and header["digest"] == _digest(compiled.compiler_log, image):
            return compiled
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    log.warning("%s is damaged and is built again", path)
    return None
