"""Write and read files of rows, a line of JSON each, with the device, versions and commit that they come from."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_rows(path: Path, is_row: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Return the rows of a file, packed or not. A last line that was cut off is left out.

    Raises:
        ValueError: another line is no row.
    """
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text("utf-8")
    lines, found = text.splitlines(), []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not is_row(row):
                raise ValueError("it lacks fields")
        except ValueError as error:
            if number == len(lines) and not text.endswith("\n"):
                break
            raise ValueError(f"{path.name}, line {number} is no row of this script: {error}") from error
        found.append(row)
    return found


def facts(device: str) -> dict[str, Any]:
    """Return the name of the device, and the versions of code, PyTorch and Python."""
    import torch

    from suite.measure.environment import git_state
    from suite.results.store import REPOSITORY

    commit, dirty = git_state(REPOSITORY)
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "device": device,
        "commit": commit,
        "code_changed": dirty,
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
    }
