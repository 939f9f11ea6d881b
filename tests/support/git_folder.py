"""Run git in a folder, without the settings of whoever runs the tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ALONE = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **ALONE}).stdout


def commit(folder: Path) -> str:
    """Commit what is there, changed or not, and return the commit."""
    git(folder, "add", "-A")
    git(folder, "commit", "--allow-empty", "-qm", "more")
    return git(folder, "rev-parse", "HEAD").strip()
