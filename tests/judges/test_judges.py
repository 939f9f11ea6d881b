"""What the judges are made of, and a sample of PyTorch's own operator tests on the simulated device.

The databases are imported in processes of their own: their modules change settings of the whole process.
"""

from __future__ import annotations

import gzip
import json
import os
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from judges import page, plugin, projects, rows, trial
from judges.cases import copied
from judges.databases import Task
from judges.plugin import given_compiler
from judges.pool import Pool
from judges.wheel import begun_rows, failed_tasks, remaining

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


def judged(jobs: list[tuple[str, tuple[str, ...]]], folder: Path, **keywords: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    settings = {"deadline": time.monotonic() + 560, "timeout_s": 120.0, **keywords}
    pool = Pool(jobs, "simulated", 1, log=folder / "log", tell=found.append, environment={}, **settings)
    pool.run()
    assert not pool.failed_starts, (folder / "log").read_text()
    return found


@pytest.mark.timeout(600)  # half a minute of work, on however busy a machine
def test_operators_on_the_simulated_device_match(tmp_path: Path) -> None:
    found = judged([(key, ("compile", "encore")) for key in SIMULATED], tmp_path)
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
    for compiler in ("eager", *command["compilers"]):
        print(json.dumps({"begin": compiler}), flush=True)
        if command["task"] == f"crash {compiler}":
            os._exit(3)
        if command["task"] == f"hang {compiler}":
            time.sleep(60)
        if compiler != "eager":
            row = {"task": command["task"], "compiler": compiler, "passed": True, "replays": 1}
            print(json.dumps({"row": row}), flush=True)
    print(json.dumps({"done": True}), flush=True)
"""


def test_crash_costs_one_compiler_of_a_sample(tmp_path: Path) -> None:
    jobs = [(key, ("compile", "stock", "encore")) for key in ("crash stock", "fine", "hang encore", "crash eager")]
    found = rows.by_task(judged(jobs, tmp_path, worker=("-c", WORKER), timeout_s=3.0))
    assert {name: row["passed"] for name, row in found["fine"].items()} == dict.fromkeys(jobs[0][1], True)
    crashed = found["crash stock"]
    assert [crashed[name]["passed"] for name in jobs[0][1]] == [True, False, True]
    assert crashed["stock"]["wrong"] == "the process ended: exit code 3"
    assert found["hang encore"]["encore"]["wrong"] == "the process ended: no answer in time"
    assert found["crash eager"]["eager"]["skipped"] == "eager ends the process: exit code 3"


def test_samples_with_rows_are_not_run_again() -> None:
    tasks = [Task("op_db", name, "function", "float32", 0) for name in ("add", "mul", "sub")]
    done = [
        {"task": tasks[0].key, "compiler": "compile", "passed": True},
        {"task": tasks[1].key, "compiler": "eager", "skipped": "there are 0 samples"},
    ]
    assert remaining(tasks, done, ("compile", "encore")) == [
        (tasks[0].key, ("encore",)),
        (tasks[2].key, ("compile", "encore")),
    ]
    assert all(Task.parse(task.key) == task for task in tasks)


def test_recorded_rows_begin_a_run_once(tmp_path: Path) -> None:
    recorded, path = tmp_path / "recorded.jsonl.gz", tmp_path / "rows.jsonl"
    recorded.write_bytes(gzip.compress("".join(json.dumps(one) + "\n" for one in RECORDED).encode()))
    assert begun_rows(path, recorded) == RECORDED == rows.read(path)
    more = row("op_db|div|function|float32|0", "compile", passed=True)
    path.write_text(path.read_text() + json.dumps(more) + "\n")
    assert begun_rows(path, recorded) == [*RECORDED, more], "rows that are there already are kept"
    assert failed_tasks(RECORDED) == {"op_db|mul|function|float32|0", "op_db|sub|function|float32|0"}


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
    assert "| op_db | compile | 3 | 3 | 2 | - | - | 0 |" in rows.table(RECORDED)
    assert "| op_db | encore | 3 | 3 | 1 | 1 | 1 | 0 |" in rows.table(RECORDED)
    assert rows.table(RECORDED[::-1]) == rows.table(RECORDED), "compilers stand in the same order"


def test_rows_are_read_up_to_a_line_that_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    text = "".join(json.dumps(one) + "\n" for one in RECORDED)
    file.write_text(text + '{"task": "op_d')
    assert rows.read(file) == RECORDED
    file.write_text('{"task": "op_d\n' + text)
    with pytest.raises(ValueError, match="line 1 is no row"):
        rows.read(file)


def test_page_has_the_tables_of_recorded_rows(tmp_path: Path) -> None:
    text = page.PAGE.read_text("utf-8")
    assert page.written(text) == text, "run python -m tests.judges.page"
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


def test_shifted_inputs_are_misaligned() -> None:
    memory = torch.arange(12.0)
    one, other = copied((memory[2:6].view(2, 2), memory[5:]), shifted=True)
    assert one.data_ptr() % 16 == 12 and torch.equal(one, memory[2:6].view(2, 2))
    assert other.data_ptr() - one.data_ptr() == 12 and torch.equal(other, memory[5:])
    assert copied(memory).data_ptr() % 16 == 0


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


def test_projects_compile_with_the_chosen_compiler() -> None:
    calls: list[Any] = []

    def stock(model: Any, **keywords: Any) -> Any:
        calls.append(keywords)
        return model

    compile_ = given_compiler(stock, {"backend": "encore"})
    compile_(len, fullgraph=True, mode="max-autotune")
    compile_(dynamic=True)(len)
    compile_(len, backend="eager")
    assert calls == [
        {"fullgraph": True, "backend": "encore"},
        {"dynamic": True, "backend": "encore"},
        {"backend": "eager"},
    ]


def test_calls_of_what_is_compiled_are_repeated() -> None:
    calls: list[int] = []
    compile_ = given_compiler(lambda model: model, {}, calls=4)
    assert compile_(lambda value: calls.append(value) or len(calls))(7) == 4 and calls == [7] * 4
    module = torch.nn.Identity()
    module.register_forward_hook(lambda *given: calls.append(0))
    assert compile_(module) is module and module(5) == 5 and len(calls) == 5


@pytest.mark.parametrize("name", projects.PROJECTS)
def test_cut_of_a_checkout_has_what_tests_need(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout, needed = tmp_path / "checkout", projects.PROJECTS[name].needed
    for path in needed:
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".py") or path.endswith(".toml"):
            (checkout / path).write_text("x")
        else:
            (checkout / path).mkdir(parents=True)
    folder = next(path for path in needed if (checkout / path).is_dir())
    (checkout / folder / "picture.png").write_bytes(os.urandom(2**20 + 1))
    (checkout / folder / "module.py").write_text("x")
    (checkout / "other").mkdir()
    to = tmp_path / "cut.tar.gz"
    assert projects.main([name, "--cut", str(checkout), "--to", str(to)]) == 0
    with tarfile.open(to) as archive:
        names = archive.getnames()
    assert set(needed) | {f"{folder}/module.py"} <= set(names)
    assert f"{folder}/picture.png" not in names and "other" not in names
    assert projects.main([name, "--list"]) == 0
    assert all(path in capsys.readouterr().out for path in needed[:1])
    with pytest.raises(SystemExit):
        projects.main([name, str(tmp_path / "out"), "--checkout", str(checkout / "other")])
    assert f"has no {needed[0]}" in capsys.readouterr().err


def test_only_files_with_tests_that_compile_are_run(tmp_path: Path) -> None:
    (tmp_path / "tests" / "deep").mkdir(parents=True)
    (tmp_path / "tests" / "test_plain.py").write_text("def test_smoke(): pass")
    (tmp_path / "tests" / "deep" / "test_compiled.py").write_text("    def test_some_dynamo(self): pass")
    assert projects.chosen_files(projects.PROJECTS["kornia"], tmp_path) == ["tests/deep/test_compiled.py"]
    assert projects.chosen_files(projects.PROJECTS["tensordict"], tmp_path) == ["test/compile/test_compile.py"]


@dataclass(frozen=True)
class Item:
    nodeid: str


def test_first_test_of_each_class_runs_first() -> None:
    items: list[Any] = [Item(name) for name in ("a.py::A::1", "a.py::A::2", "a.py::B::1", "b.py::A::1")]
    plugin.pytest_collection_modifyitems(items)
    assert [one.nodeid for one in items] == ["a.py::A::1", "a.py::B::1", "b.py::A::1", "a.py::A::2"]


def test_a_projects_tests_run_under_each_compiler(tmp_path: Path) -> None:
    compilers = "compile,encore"
    checkout, out = tmp_path / "checkout", tmp_path / "out"
    for path in projects.PROJECTS["kornia"].needed:
        (checkout / path).mkdir(parents=True) if "." not in path else (checkout / path).write_text("")
    (checkout / "tests" / "test_it.py").write_text(
        "import torch\n\ndef test_dynamo():\n    assert torch.compile.__wrapped__\n\n"
        "def test_dynamo_fails():\n    raise ValueError('no')\n"
    )
    given = ["kornia", str(out), "--checkout", str(checkout), "--device", "cpu", "--compilers", compilers]
    assert projects.main([*given, "--jobs", "1", "--seconds", "300"]) == 0
    first, *found = rows.read(out / "rows.jsonl")
    assert first["run"]["compilers"] == compilers.split(",")
    passed = {(one["task"].rpartition("::")[2], one["compiler"]): one["passed"] for one in found}
    assert passed == {
        (name, compiler): name == "test_dynamo"
        for name in ("test_dynamo", "test_dynamo_fails") for compiler in compilers.split(",")
    }  # fmt: skip
    assert projects.main([*given, "--jobs", "1", "--seconds", "300"]) == 0
    assert rows.read(out / "rows.jsonl") == [first, *found], "nothing is run twice"
