"""Locate the folder for files that Encore makes once and reads again."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path


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
