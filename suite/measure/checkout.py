"""Identify the running checkout: its commit, whether its code was changed since, and an id of the current code."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

CODE = ("encore", "suite", "models", "optimizations", "pyproject.toml", "requirements.lock")
"""Files that shape numbers, at the top of the repository: the dirty flag and the code id are about these, so that a
newly drawn figure changes neither."""

SHOWN_DIGITS = 12
"""Number of digits of a code id in texts."""


def git_state(repository: Path) -> tuple[str | None, bool | None]:
    """Return (commit, whether code differs from it); Nones where the folder is not its own git checkout."""
    commit = _git(repository, "rev-parse", "HEAD")
    if commit is None or _git(repository, "rev-parse", "--show-prefix") != "":
        return None, None
    status = _git(repository, "status", "--porcelain", "--untracked-files=normal", "--", *CODE)
    return commit, None if status is None else bool(status)


def code_id(repository: Path) -> str:
    """Return the SHA-256, in hexadecimal, of the names and contents of the current code, committed or not.

    Equal ids mean equal code, independently of commits.
    """
    digest = hashlib.sha256()
    for folder in CODE:
        for path in sorted([repository / folder, *(repository / folder).rglob("*")]):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(repository)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def shown_code(code: str | None) -> str | None:
    """Return the first digits of a code id, for texts."""
    return None if code is None else code[:SHOWN_DIGITS]


def _git(repository: Path, *arguments: str) -> str | None:
    """Return what git prints; None where it fails. Without its optional locks, `git status` leaves the index as it
    is."""
    command = ["git", "--no-optional-locks", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return os.fsdecode(done.stdout).strip()
