"""docs/extending.md: its own code, put where it says, adds a workload, a mode and a metric that a run then has."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from suite.results.store import REPOSITORY

DOCUMENT = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")
PLACED = re.compile(
    r"<!-- (?P<how>file|append|insert): (?P<rest>[^>]+) -->\n```(?:python|text)\n(?P<code>.*?)```", re.DOTALL
)
PACKAGES = ("encore", "suite", "models", "optimizations", "host_tuning")


def apply(text: str, where: str, code: str) -> str:
    """The text of a file with the code inserted where the document says."""
    how, _, anchor = where.partition(": ")
    if how == "above":
        (line,) = (line for line in text.splitlines(keepends=True) if line.strip().startswith(anchor))
        return text.replace(line, code + line)
    assert how == "end of"
    start = text.index(f"\n{anchor}(")
    end = text.find("\n\n\n", start)
    return f"{text[:end]}\n{code.rstrip()}{text[end:]}"


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the suite with everything the document adds."""
    root = tmp_path_factory.mktemp("extended")
    for package in PACKAGES:
        shutil.copytree(REPOSITORY / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "results").mkdir()
    shutil.copy(REPOSITORY / "results" / "published.json", root / "results")
    for block in PLACED.finditer(DOCUMENT):
        name, _, where = block["rest"].partition(" | ")
        path = root / name
        match block["how"]:
            case "file":
                assert not path.exists(), f"{name} is there already"
                path.write_text(block["code"])
            case "append":
                path.write_text(f"{path.read_text()}\n\n{block['code']}")
            case "insert":
                path.write_text(apply(path.read_text(), where, block["code"]))
    return root


def encore(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "suite", *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=800,
    )


def test_every_piece_of_the_document_is_placed() -> None:
    assert len(PLACED.findall(DOCUMENT)) == DOCUMENT.count("```python") + DOCUMENT.count("```text") == 3


@pytest.mark.timeout(900)
def test_the_command_of_the_document_measures_what_it_added(extended: Path) -> None:
    (command,) = re.findall(r"^encore (run DEMO .*)$", DOCUMENT, re.MULTILINE)
    done = encore(extended, *command.split(), "--blocks", "5", "--out", str(extended / "run"))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (extended / "run" / "cells.jsonl").read_text().splitlines()]
    assert [(row["workload"], row["mode"], row["status"]) for row in rows] == [
        ("DEMO", "eager", "pass"),
        ("DEMO", "aot-eager", "pass"),
    ]
    assert {row["parameters"] for row in rows} == {131_841}
    assert all(row["metrics"]["more"]["issue"]["issue_us"] > 0 for row in rows)
    assert rows[1]["baselines"] == ["eager"] and rows[1]["metrics"]["graphs"]["fx_graphs"] >= 1
    with (extended / "run" / "report" / "tables" / "issue.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["mode"] for row in table] == ["eager", "aot-eager"]
    assert all(float(row["issue_us"]) > 0 for row in table)
    assert "Time to issue" in (extended / "run" / "report" / "report.html").read_text()


def test_the_workload_and_the_mode_are_listed(extended: Path) -> None:
    listed = {line.split()[0] for line in encore(extended, "list").stdout.splitlines() if line.strip()}
    assert {"DEMO", "aot-eager"} <= listed
