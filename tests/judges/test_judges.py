"""Test the parts of the judges, and a sample of PyTorch's own operator tests on the simulated device.

The databases are imported in processes of their own: their modules change settings of the whole process.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_pool import Pool

from judges import page, rows, trial
from judges.cases import copied

SIMULATED = (
    "custom_op_db|NumpyMulCustomOp|opcheck|float32|0",
    "op_db|add|function|bfloat16|0",
    "op_db|cat|out|float32|0",
    "op_db|cfloat|function|float32|0",
    "op_db|clamp|inplace|float32|0",
    "op_db|cumsum|inplace|float32|0",
    "op_db|diagonal_copy|function|float32|0",
    "op_db|expand|function|float32|0",
    "op_db|fft.irfft|function|complex64|0",
    "op_db|gather|function|float32|0",
    "op_db|index_add|inplace|float32|0",
    "op_db|index_put|function|float32|0",
    "op_db|linalg.qr|function|complex64|0",
    "op_db|masked_fill|inplace|float32|0",
    "op_db|mul|function|complex64|0",
    "op_db|scatter_add|function|float32|0",
    "op_db|sort|out|float32|0",
    "op_db|split|function|float32|0",
    "op_db|topk|function|float32|0",
    "op_db|unbind|function|float32|0",
    "op_db|unfold|function|float32|0",
    "op_db|var_mean|function|float32|0",
    "op_db|view_as_complex|function|float32|0",
)
WITH_A_GRAPH = 15
"""At least so many of them launch a graph in their last call; a view alone has nothing to launch."""


SIMULATED_WORKER = ("-P", "-m", "tests.judges.worker", "simulated")


def judged(
    jobs: list[tuple[str, tuple[str, ...]]], folder: Path, command: tuple[str, ...], timeout_s: float = 120.0
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + 560
    pool = Pool(command, jobs, found.append, size=1, log=folder / "log", timeout_s=timeout_s, deadline=deadline)
    pool.run()
    assert not pool.failed_starts, (folder / "log").read_text()
    return found


@pytest.mark.timeout(600)  # half a minute of work, on however busy a machine
def test_operators_on_the_simulated_device_match(tmp_path: Path) -> None:
    found = judged([(key, ("compile", "encore")) for key in SIMULATED], tmp_path, SIMULATED_WORKER)
    samples = rows.by_task(found)
    assert samples.keys() == set(SIMULATED)
    assert not [row for row in found if not row.get("passed")]
    assert not [row for row in found if "unlike_compile" in row]
    assert sum(of["encore"]["replays"] > 0 for of in samples.values()) >= WITH_A_GRAPH


WORKER = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    for compiler in ("eager", *command["parts"]):
        print(json.dumps({"begin": compiler}), flush=True)
        if command["task"] == f"crash {compiler}":
            os._exit(3)
        if command["task"] == f"hang {compiler}":
            time.sleep(60)
        if compiler != "eager":
            row = {"task": command["task"], "compiler": compiler, "passed": True, "replays": 1}
            row |= {"name": command["task"], "verdict": "equal"}
            print(json.dumps({"row": row}), flush=True)
    print(json.dumps({"done": True}), flush=True)
"""


def test_crash_costs_one_compiler_of_a_sample(tmp_path: Path) -> None:
    jobs = [(key, ("compile", "stock", "encore")) for key in ("crash stock", "fine", "hang encore", "crash eager")]
    found = rows.by_task(judged(jobs, tmp_path, ("-c", WORKER), timeout_s=3.0))
    assert {name: row["passed"] for name, row in found["fine"].items()} == dict.fromkeys(jobs[0][1], True)
    crashed = found["crash stock"]
    assert [crashed[name]["passed"] for name in jobs[0][1]] == [True, False, True]
    assert crashed["stock"]["wrong"] == "the process ended: exit code 3"
    assert found["hang encore"]["encore"]["wrong"] == "the process ended: no answer in time"
    assert found["crash eager"]["eager"]["skipped"] == "eager ends the process: exit code 3"


def row(task: str, compiler: str, **facts: Any) -> dict[str, Any]:
    return {"task": task, "compiler": compiler, "passed": True, "replays": 0, **facts}


RECORDED = [
    {"run": {"device": "a GPU", "torch": "2.11.0", "commit": "0123456789abcdef", "remain": 1234}},
    row("op_db|add|function|float32|0", "compile"),
    row("op_db|add|function|float32|0", "encore", replays=2),
    row("op_db|mul|function|float32|0", "compile"),
    row("op_db|mul|function|float32|0", "encore", passed=False, wrong="call 3, value 0: other values"),
    row("op_db|sub|function|float32|0", "compile", passed=False, wrong="no"),
    row("op_db|sub|function|float32|0", "encore", passed=False, wrong="no"),
]


def test_table_counts_passes_graphs_and_failures() -> None:
    assert rows.findings(RECORDED) == ["op_db|mul|function|float32|0: call 3, value 0: other values"]
    assert "| op_db | 3 | 3 | 2 | 0 (0) | 1 (1) | 0, 1 | 0, 0 |" in rows.table(RECORDED)
    skipped = {"task": "op_db|neg|function|float32|0", "compiler": "eager", "skipped": "eager raises"}
    assert rows.table([*RECORDED, skipped]) == rows.table(RECORDED), "what is not judged does not count"


def test_page_has_the_tables_of_recorded_rows(tmp_path: Path) -> None:
    text = page.PAGE.read_text("utf-8")
    assert not page.main(["--check"]), "run python -m tests.judges.page"
    assert "not measured" in page.written(text, tmp_path)
    (tmp_path / "wheel.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RECORDED))
    new = page.written(text, tmp_path)
    assert "not measured" not in new and "a GPU, PyTorch 2.11.0, commit 0123456789" in new
    assert "1,234 samples of the wheel remain to be judged." in new
    assert page.written(new, tmp_path) == new


def test_copied_inputs_lie_as_the_originals_do() -> None:
    memory = torch.arange(24.0)
    nest = (memory[1:7].view(2, 3).t(), {"same": memory[3:5], "number": 2}, [torch.ones(2).expand(3, 2)])
    made = copied(nest)
    (one, others, [wide]), same = made, made[1]["same"]
    assert one.stride() == (1, 3) and one.storage_offset() == 1 and others["number"] == 2 and wide.stride() == (0, 1)
    assert one.data_ptr() != nest[0].data_ptr()
    same.fill_(-1)
    assert torch.equal(one.flatten().sort().values[:2], torch.full((2,), -1.0)), "they no longer share memory"
    assert memory.min() == 0


def outcome(*values: torch.Tensor, error: str | None = None) -> trial.Outcome:
    return trial.Outcome([[trial.Leaf.of(value) for value in values]], error)


def test_outcomes_differ_by_values_shapes_and_errors() -> None:
    ones = torch.ones(2, 3)
    assert trial.difference(outcome(ones), outcome(ones + 1e-7), None, None) is None
    assert trial.unlike_bits(outcome(ones), outcome(ones + 1e-6))
    assert trial.unlike_bits(outcome(ones), outcome(ones.t().contiguous().t()))
    for other in (ones + 0.1, ones.double(), torch.ones(3, 2)):
        assert trial.difference(outcome(other), outcome(ones), None, None)
    assert trial.difference(outcome(ones + 0.1), outcome(ones), 0.2, 0.2) is None
    assert trial.difference(outcome(error="RuntimeError: no"), outcome(ones), None, None) == "RuntimeError: no"
