"""Write a file so that a reader, or a crash, sees the old content or the new, never a part."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`.

    Raises:
        OSError: the folder is missing or not writable, or the disk is full; `path` is as before and nothing is left.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp's files are for their owner alone
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The content is there. File systems of networks and of user programs may refuse to sync a folder.
    with contextlib.suppress(OSError):
        _make_durable(path.parent)


def _make_durable(folder: Path) -> None:
    """Let a rename in this folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
