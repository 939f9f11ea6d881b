"""What TorchBench's judge starts, and the rows and the table that it makes of the suite's runs."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fixtures.synthetic_results import cell, failed_cell, metrics, write_run

from judges import projects, torchbench
from suite.results.schema import HostUse, Status

QUIET, BUSY = (HostUse(cpu_cores=cores, gpus_at_work=0, gpu_processes=0) for cores in (0.1, 5.0))


class Process:
    """Stand in for a run of the suite, which lasts until it is interrupted."""

    def __init__(self, command: list[str], *, env: dict[str, str], **given: Any) -> None:
        self.words, self.checkout = command[5:], env["PYTHONPATH"].partition(":")[0]
        self.signals: list[int] = []
        started.append(self)

    def wait(self, seconds: float) -> None:
        if not self.signals:
            raise subprocess.TimeoutExpired("suite", seconds)

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


started: list[Process] = []


def test_models_are_judged_side_by_side_and_timed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchbench.subprocess, "Popen", Process)
    started.clear()
    for path in projects.PROJECTS["torchbench"].needed:
        (tmp_path / path).mkdir()
    out = tmp_path / "out"
    given = ["torchbench", str(out), "--checkout", str(tmp_path), "--seconds", "60", "--timed-seconds", "20"]
    assert projects.main([*given, "--only", "alexnet,vgg16,hf_T5", "--jobs", "2"]) == 1, "nothing was judged"
    assert [one.words[:2] for one in started[:2]] == [
        ["torchbench:alexnet", "torchbench:hf_T5"], ["torchbench:vgg16", "--variant"],
    ]  # fmt: skip
    assert started[2].words[0] == "torchbench:alexnet" and started[2].words[1] == "--variant", "what is timed"
    assert "eager,compile,graph,encore" in started[2].words
    assert all(one.checkout == str(tmp_path) and one.signals == [signal.SIGINT] for one in started)
    assert [Path(one.words[-1]).name for one in started] == ["part1", "part2", "run"]
    assert all("random-weights" in one.words for one in started)
    (out / "run").mkdir()
    (out / "run" / "environment.json").write_text("{}")
    started.clear()
    monkeypatch.setattr(torchbench, "write_rows", lambda folder: 0)
    assert projects.main([*given, "--only", "alexnet", "--jobs", "1"]) == 0
    assert started[-1].words == ["--resume", str(out / "run")]
    started.clear()
    projects.main([*given, "--jobs", "3"])
    begun = [f"torchbench:{name}" for name in torchbench.MODELS[:3]]
    assert [one.words[0] for one in started] == [*begun, "EOS", "--resume"]


def test_every_model_is_named_once() -> None:
    assert len(set(torchbench.MODELS)) == len(torchbench.MODELS) >= 25
    assert set(torchbench.TIMED) <= set(torchbench.MODELS) and len(torchbench.TIMED) >= 15


def rows_of(tmp_path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    kernels = metrics().model_copy(update={"kernels": {"triton_poi_add 1x1x1 32x1x1": 3, "gemm 8x1x1 64x1x1": 1}})
    part = [
        cell("torchbench:one", "compile", 100.0, metrics=kernels),
        cell("torchbench:one", "encore", 50.0, metrics=kernels),
        cell("torchbench:two", "compile", 10.0, metrics=kernels),
        failed_cell("torchbench:two", "encore", Status.FAIL_ACCURACY, "other values\nin detail"),
    ]
    timed = [
        cell("torchbench:one", "eager", 300.0, others=QUIET),
        cell("torchbench:one", "compile", 80.0, metrics=kernels, others=QUIET),
        cell("torchbench:one", "graph", 70.0, metrics=kernels, others=BUSY),
        cell("torchbench:one", "encore", 40.0, metrics=kernels, others=QUIET),
    ]
    out = tmp_path / "out"
    write_run(out / "part1", part)
    write_run(out / "run", timed)
    assert torchbench.write_rows(out) == 1, "one fails under Encore and passes under plain compile"
    first, *rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert first["run"]["device"] == "SYNTHETIC GPU"
    assert "torchbench|two: fail_accuracy: other values" in (out / "summary.txt").read_text()
    return {(row["task"], row["compiler"]): row for row in rows}


def test_rows_have_results_kernels_and_quiet_times_only(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    assert rows.keys() == {
        ("torchbench|one", "compile"), ("torchbench|one", "stock"), ("torchbench|one", "encore"),
        ("torchbench|two", "compile"), ("torchbench|two", "encore"),
    }  # fmt: skip
    one = rows["torchbench|one", "encore"]
    assert one["passed"] and (one["kernels"], one["generated"]) == (4, 3)
    assert one["over_compile"][0] == pytest.approx(2.0, rel=0.05)
    assert "over_compile" not in rows["torchbench|one", "stock"], "others were at work"
    two = rows["torchbench|two", "encore"]
    assert not two["passed"] and two["wrong"] == "fail_accuracy: other values"


def test_table_has_a_line_for_each_model(tmp_path: Path) -> None:
    lines = torchbench.table(list(rows_of(tmp_path).values())).splitlines()
    assert lines[2].startswith("| one | 4 | 75 % |") and " 2.0" in lines[2]
    assert lines[3].startswith("| two | 4 | 75 % |") and lines[3].endswith("| not run | fail_accuracy |")
    assert lines[4:] == [
        "",
        "Stock's graphs: of 0 timed, faster than plain compile none; slower none.",
        "Encore: of 1 timed, faster than plain compile one; slower none.",
    ]
