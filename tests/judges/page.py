"""Writes the tables of `docs/judges.md` from the recorded rows: `python -m tests.judges.page [--check]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import rows as rows_of
from . import torchbench

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "judges.md"
RECORDED = ROOT / "results" / "recorded" / "judges"
VERSIONS = {"PyTorch": "torch", "Triton": "triton", "Python": "python"}
BEGIN, END = "<!-- generated: judges -->", "<!-- end: judges -->"


def written(page: str, folder: Path = RECORDED) -> str:
    """Return the page with tables of what is recorded in `folder`. Raises ValueError if the page has no place."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} followed by {END}")
    return f"{before}{BEGIN}\n\n{_tables(folder)}\n\n{END}{after}"


def _tables(folder: Path) -> str:
    files = sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")]) if folder.is_dir() else []
    rows: list[dict[str, Any]] = [row for file in files for row in rows_of.read(file)]
    if not any("passed" in row for row in rows):
        return "not measured"
    runs = [row["run"] for row in rows if "run" in row]
    where = dict.fromkeys(_place(run) for run in runs)
    found = [f"* {line}" for line in rows_of.findings(rows)]
    parts = [rows_of.table(rows)]
    if where:
        parts += ["Measured on:", "\n".join(where)]
    if left := rows_of.remain(rows):
        parts.append(f"{left:,} samples of the wheel remain to be judged.")
    parts += ["Fail under Encore and pass under plain compile:", "\n".join(found) if found else "none"]
    if any(row.get("task", "").startswith("torchbench|") for row in rows):
        parts += ["TorchBench's models, with random weights:", torchbench.brief(rows)]
    return "\n\n".join(parts)


def _place(run: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {run[key]}" for name, key in VERSIONS.items() if run.get(key))
    return f"* {run['device']}, {versions}, commit {(run['commit'] or 'unknown')[:10]}"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    page = PAGE.read_text("utf-8")
    new = written(page)
    if list(arguments) == ["--check"]:
        return int(page != new)
    if arguments:
        print("usage: python -m tests.judges.page [--check]", file=sys.stderr)
        return 2
    PAGE.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
