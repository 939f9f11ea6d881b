"""Write and read files of rows, a line of JSON each, with the device, versions and commit that they come from."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterable
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


class RowFile:
    """The rows of a file that is not packed, and those that are added to it, each at once.

    Without a path rows are only kept.
    """

    def __init__(self, path: Path | None, is_row: Callable[[dict[str, Any]], bool]) -> None:
        self.path, self._is_row = path, is_row
        self.rows: list[dict[str, Any]] = []
        self.read()

    def read(self) -> None:
        """Read the file, if it is there, and cut off a last line that is not complete."""
        if self.path is not None and self.path.exists():
            self.rows = read_rows(self.path, self._is_row)
            if not self.path.read_bytes().endswith(b"\n"):
                self.replace(self.rows)

    def replace(self, rows: Iterable[dict[str, Any]]) -> None:
        """Let the file have these rows alone."""
        self.rows = list(rows)
        if self.path is not None:
            self.path.write_text("".join(map(_line, self.rows)), "utf-8")

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as out:
                out.write(_line(row))


def _line(row: dict[str, Any]) -> str:
    """Return a row as JSON. An infinite number is a string, for JSON has no such number; `float` reads it back."""
    valid = {name: "Infinity" if value == float("inf") else value for name, value in row.items()}
    return json.dumps(valid) + "\n"


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
