"""Real tiny workloads through the real runner, workers and report, on the CPU: nothing is faked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from suite.results.schema import Grouping, Status
from suite.results.store import read_run


def encore(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "suite", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.mark.timeout(900)
def test_two_workloads_run_on_the_cpu_and_are_reported_as_such(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    options = ("--device", "cpu", "--size", "tiny", "--blocks", "5", "--measure-s", "0")
    done = encore("run", "EOS", "DCGAN", "--modes", "eager,compile", *options, "--out", str(run))
    assert done.returncode == 0, done.stderr
    cells = read_run(run).cells
    order = [(cell.workload, cell.mode) for cell in cells]
    assert order == [(name, mode) for name in ("EOS", "DCGAN") for mode in ("eager", "compile")]
    for cell in cells:
        assert cell.status is Status.PASS, cell.error
        assert (cell.device, cell.size) == ("cpu", "tiny")
        assert (cell.grouping, cell.group) == (Grouping.TOGETHER, ["eager", "compile"])
        assert len(cell.blocks) == 5 and all(len(block.host_us) >= 2 for block in cell.blocks)
        assert all(sample > 0 for block in cell.blocks for sample in block.host_us)
        assert all(block.device_us is None for block in cell.blocks), "there is no device to time"
        assert cell.correctness is not None
        assert cell.correctness.passed
        assert cell.correctness.input_count >= 2
    turns = sorted(block.turn for cell in cells if cell.workload == "EOS" for block in cell.blocks)
    assert turns == list(range(10))
    reported = encore("report", str(run), "--out", str(tmp_path / "report"))
    assert reported.returncode == 0, reported.stderr
    page = (tmp_path / "report" / "report.html").read_text()
    assert "DCGAN" in page
    assert "CPU" in reported.stderr, "a run on a CPU says nothing about performance, and the report says so"
