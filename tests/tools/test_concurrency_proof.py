"""`tests/gpu/concurrency_proof.py`: rows, processes and the table."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

GPU_TESTS = Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(GPU_TESTS))

import concurrency_proof as proof  # noqa: E402

SCRIPTS = {
    "fine": "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{\"recordings\": []}')",
    "fails": "print('torch.OutOfMemoryError: CUDA out of memory. Tried'); print('more'); raise SystemExit(1)",
    "hangs": "import time; time.sleep(600)",
}


def started(scripts: Mapping[str, str], folder: Path) -> Callable[[str, proof.Chosen, Path], proof.Running]:
    def start(phase: str, chosen: proof.Chosen, cache: Path) -> proof.Running:
        row, log = folder / f"{chosen.name}.{phase}.json", folder / f"{chosen.name}.{phase}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", SCRIPTS[scripts[chosen.name]], str(row)], stdout=file, start_new_session=True
            )
        return proof.Running(phase, chosen, process, row, log, time.monotonic())

    return start


def test_existing_rows_are_not_run_again(tmp_path: Path) -> None:
    wanted = [proof.Chosen("A", "published"), proof.Chosen("B", "current")]
    out = tmp_path / "rows.jsonl"
    one = proof.Proof(out, tmp_path, 2, time.monotonic() + 60, started({"A": "fine", "B": "fails"}, tmp_path))
    assert one.run(wanted)
    found = {(row["phase"], row["workload"]): row["status"] for row in one.rows}
    assert found == {**{(phase, "A"): "ok" for phase in proof.PHASES}, ("prepare", "B/current"): "failed"}
    again = proof.Proof(out, tmp_path, 2, time.monotonic() + 60)
    assert again.missing("measure", wanted) == again.missing("prepare", wanted) == wanted[1:]
    (failed,) = [row for row in again.rows if row["status"] == "failed"]
    assert failed["error"].startswith("torch.OutOfMemoryError")
    assert "B/current          failed: torch.OutOfMemoryError" in proof.table([failed])


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


@pytest.mark.parametrize("script", ["concurrency_proof.py", "steered.py", "delayed_graphs.py"])
def test_names_that_are_imported_late_exist(script: str) -> None:
    for node in ast.walk(ast.parse((GPU_TESTS / script).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = importlib.import_module(node.module)
            for one in node.names:
                assert hasattr(module, one.name) or importlib.import_module(f"{node.module}.{one.name}")
