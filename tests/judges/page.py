"""Writes what `docs/judges.md` and `docs/results.md` tell of recorded rows: `python -m tests.judges.page [--check]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from row_files import read_rows

from . import rows as rows_of
from . import torchbench

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs" / "judges.md", ROOT / "docs" / "results.md"
RECORDED = ROOT / "results" / "recorded" / "judges"
VERSIONS = {"PyTorch": "torch", "Triton": "triton", "Python": "python"}


def written(page: str, folder: Path = RECORDED) -> str:
    """Return the page of the judges with tables of what is recorded in `folder`. Raises ValueError as `_put`."""
    return _put(page, "judges", _tables(folder))


def _put(page: str, name: str, text: str) -> str:
    """Return a page with this text in its part `name`. Raises ValueError if the page has no such part."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    before, found, rest = page.partition(begin)
    _, and_end, after = rest.partition(end)
    if not found or not and_end:
        raise ValueError(f"the page has no {begin} followed by {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


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


def with_programs(page: str, folder: Path = RECORDED.parent / "programs-h200") -> str:
    """Return the page of results with the speed of the programs of `tests/gpu/programs.py`. Raises as `_put`."""
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))  # where that script finds its modules
    from real_programs import floor
    from real_programs import rows as programs

    processes = floor.by_process(read_rows(file, programs.is_row) for file in sorted(folder.glob("*.jsonl.gz")))
    where = dict.fromkeys(_place(row) for rows in processes for row in rows if "device" in row)
    return _put(page, "programs", "\n\n".join([*floor.brief(floor.speeds(processes)), "\n".join(where)]))


def _place(run: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {run[key]}" for name, key in VERSIONS.items() if run.get(key))
    return f"* {run['device']}, {versions}, commit {(run['commit'] or 'unknown')[:10]}"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) not in ([], ["--check"]):
        print("usage: python -m tests.judges.page [--check]", file=sys.stderr)
        return 2
    changed = False
    for page, renew in ((PAGE, written), (RESULTS, with_programs)):
        text = page.read_text("utf-8")
        if (new := renew(text)) != text:
            changed = True
            if not arguments:
                page.write_text(new, "utf-8")
    return int(changed and bool(arguments))


if __name__ == "__main__":
    sys.exit(main())
