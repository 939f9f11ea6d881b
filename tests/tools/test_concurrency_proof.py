"""`tests/gpu/concurrency_proof.py`: rows, processes and the table."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from row_files import RowFile

GPU_TESTS = Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(GPU_TESTS))

import concurrency_proof as proof  # noqa: E402

WORKER = """
import json, os, sys
print(json.dumps({"ready": True}), flush=True)
job = json.loads(sys.stdin.readline())
print(json.dumps({"begin": job["parts"][0]}), flush=True)
row = {"task": job["task"], "compiler": job["parts"][0], "seconds": 1.0, "status": "ok", "recordings": []}
if job["task"] == "FAILS":
    row |= {"status": "failed", "error": "OutOfMemoryError: CUDA out of memory"}
if job["task"] == "ENDS":
    os._exit(3)
print(json.dumps({"row": row}), flush=True)
print(json.dumps({"done": True}), flush=True)
assert not sys.stdin.readline(), "each process has one job"
"""


def test_existing_rows_are_not_run_again(tmp_path: Path) -> None:
    wanted = [proof.Chosen("A", "published"), proof.Chosen("FAILS", "current"), proof.Chosen("ENDS", "published")]
    rows = RowFile(tmp_path / "rows.jsonl", proof.is_row)
    settings = {"cache": tmp_path, "jobs": 2, "facts": {"device": "a GPU"}}
    assert proof.run(wanted, rows, ("-c", WORKER), deadline=time.monotonic() + 60, **settings)
    found = {(row["phase"], row["workload"]): row["status"] for row in rows.rows}
    bad = {("prepare", "FAILS/current"): "failed", ("prepare", "ENDS"): "failed"}
    assert found == {**{(phase, "A"): "ok" for phase in proof.PHASES}, **bad}
    again = RowFile(rows.path, proof.is_row).rows
    assert proof.missing(again, "measure", wanted) == proof.missing(again, "prepare", wanted) == wanted[1:]
    text = proof.table(again)
    assert "FAILS/current      failed: OutOfMemoryError: CUDA out of memory" in text
    assert "ENDS               failed: the process ended: exit code 3" in text


def measured(**more: Any) -> dict[str, Any]:
    bits = {"equal": True, "chain_differs_from_itself": [], "branches_differ": [], "tensors": 3}
    times = {"graphs_us": {"chain": 100.0, "branches": 80.0}, "gain": 1.25}
    row = {
        "phase": "measure",
        "workload": "A",
        "status": "ok",
        "recordings": [{"direction": "inference", "launches": 7, "width": 3, "longest_path": 4, "reason": ""}],
        "bits": bits,
        "times": times,
        "self": {"races": 10, "branches_won": 1},
        "delays": {"replays": 100, "differing_seeds": []},
    }
    return {**row, **more}


def test_table_has_gain_memory_bits_and_mean() -> None:
    tuned = {"phase": "prepare", "workload": "A", "status": "ok", "reserved_bytes": 150}
    chain = {"phase": "chain", "workload": "A", "status": "ok", "reserved_bytes": 100}
    slower = measured(workload="B", times={"graphs_us": {"chain": 80.0, "branches": 100.0}, "gain": 0.8})
    lines = proof.table(
        [tuned, chain, {**chain, "phase": "branches", "reserved_bytes": 102}, measured(), slower]
    ).splitlines()
    assert lines[1].split() == ["A", "7", "4", "3", "100.0", "80.0", "1.250", "1/10", "0/100", "1.020", "equal"]
    assert "geometric mean of 2, the chain where it is faster: 1.118" in lines[-1]
