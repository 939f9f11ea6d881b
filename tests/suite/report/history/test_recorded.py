"""The current code reads every file of results/recorded, and all of them together are small."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from recorded_runs import read_recorded

from suite.report.build import read_results
from suite.report.history.recording import PAGE, PART, listing
from suite.report.markdown_pages import generated_part
from suite.results.schema import Status
from suite.results.store import ENVIRONMENT, PACKED, RECORDED, read_unpacked

RUNS = sorted(path.parent for path in RECORDED.glob(f"*/{PACKED}"))
MOST_BYTES = 10_000_000


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_recorded_run_is_read_whole(run: Path) -> None:
    recorded = read_recorded(run)
    lines = gzip.decompress((run / PACKED).read_bytes()).decode().splitlines()
    assert len(recorded.cells) == len(lines) > 0
    assert recorded.environment.run_id == run.name
    for line, cell in zip(lines, recorded.cells, strict=True):
        kept = json.loads(line)
        assert (kept["workload"], kept["mode"], kept["status"]) == (cell.workload, cell.mode, cell.status.value)
        assert [block["host_us"] for block in kept["blocks"]] == [block.host_us for block in cell.blocks]
        assert cell.status is not Status.PASS or cell.blocks


def test_recorded_files_stay_small() -> None:
    """They are most of what a clone of the repository brings."""
    sizes = {path: path.stat().st_size for path in RECORDED.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= MOST_BYTES, "delete an old run: the history has its rows"


def test_recorded_page_lists_every_run() -> None:
    part = generated_part((RECORDED / PAGE).read_text(encoding="utf-8"), PART)
    assert part.strip() == listing(RECORDED), "renew it: encore record, or suite.report.history.recording.renew_page"


def test_recorded_runs_are_packed() -> None:
    assert [path.parent.name for path in RECORDED.glob(f"*/{ENVIRONMENT}") if path.parent not in RUNS] == []


def test_recorded_files_of_other_commands_are_read() -> None:
    found = read_results(None, recorded=True)
    assert found.micro is not None and found.micro.points and found.programs and found.proved
    assert found.nanogpt is not None and {cell.suite for cell in found.nanogpt.cells} == {"nanogpt"}


def test_recorded_programs_are_read_and_say_where_they_ran() -> None:
    files = RECORDED.glob("programs-*/*.jsonl.gz")
    rows = [json.loads(line) for path in files for line in read_unpacked(path).splitlines()]
    assert len(rows) >= 48
    assert {row["mode"] for row in rows} == {"eager", "compile", "stock", "encore"}
    assert all(row["program"] and row["torch"] and row["driver"] and row["commit"] for row in rows)
    of_encore = [row for row in rows if row["mode"] == "encore" and row["status"] == "ok"]
    compared = {(row["program"], row["process"]) for row in rows if row["mode"] == "eager"}
    verdicts = {row["verdict"] for row in of_encore if (row["program"], row["process"]) in compared}
    assert verdicts <= {"right", "as stock"}
    assert {row["program"] for row in of_encore} <= {program for program, _ in compared}
