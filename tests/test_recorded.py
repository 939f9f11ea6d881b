"""What is recorded stays readable: every file of results/recorded, by the code of today."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from recorded_runs import read_recorded

from suite.micro.records import read_micro_run
from suite.report.join import load_runs
from suite.report.load import load_explanations
from suite.report.paper.nanogpt import read_nanogpt
from suite.schema import READABLE_VERSIONS, SCHEMA_VERSION, Status
from suite.store import ENVIRONMENT, PACKED, RECORDED

RUNS = sorted(path.parent for path in RECORDED.glob(f"*/{PACKED}"))
OLDEST = RECORDED / "20261120-131935-h200"
"""The first run that was recorded: of schema version 1, before rows named kernels or processes."""


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_recorded_run_is_read_whole(run: Path) -> None:
    recorded = read_recorded(run)
    lines = gzip.decompress((run / PACKED).read_bytes()).decode().splitlines()
    assert len(recorded.cells) == len(lines) > 0 and recorded.cut_line is None
    assert recorded.environment.run_id == run.name
    for line, cell in zip(lines, recorded.cells, strict=True):
        kept = json.loads(line)
        assert (kept["workload"], kept["mode"], kept["status"]) == (cell.workload, cell.mode, cell.status.value)
        assert [block["host_us"] for block in kept["blocks"]] == [block.host_us for block in cell.blocks]
        assert cell.status is not Status.PASS or cell.blocks


def test_all_runs_of_one_gpu_make_one_report_and_none_is_left_out() -> None:
    assert {path.name for path in RUNS} >= {OLDEST.name, "20261120-133721-h200", "20261120-140122-h200"}
    assert load_runs([OLDEST]).cells


def test_all_that_is_recorded_is_packed() -> None:
    assert [path.parent.name for path in RECORDED.glob(f"*/{ENVIRONMENT}") if path.parent not in RUNS] == []


def test_every_version_that_was_written_is_read() -> None:
    """A new version is read next to the old ones: version 1 is recorded."""
    assert json.loads((OLDEST / ENVIRONMENT).read_text())["schema_version"] == 1
    assert {1, SCHEMA_VERSION} <= set(READABLE_VERSIONS)


def test_recorded_explanations_and_other_files_are_read() -> None:
    assert len(load_explanations(RECORDED / "explained")) >= 20
    for path in RECORDED.glob("*/indirection.json"):
        assert read_micro_run(path).points
    for path in RECORDED.glob("*/nanogpt.json"):
        assert read_nanogpt(path).configurations


def test_recorded_programs_are_read_and_say_where_they_ran() -> None:
    rows = [json.loads(line) for path in RECORDED.glob("programs-*/programs.jsonl") for line in path.open()]
    assert len(rows) >= 48
    assert {row["mode"] for row in rows} == {"eager", "stock", "encore"}
    assert all(row["program"] and row["torch"] and row["driver"] and row["commit"] for row in rows)
    assert {row["verdict"] for row in rows if row["mode"] == "encore" and row["status"] == "ok"} <= {
        "right",
        "as stock",
    }
