"""The suite and host_tuning on a GPU: drawings, runs of own programs, trials, checks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from host_tuning import Disturbance, check
from host_tuning.gpu import Nvml
from suite.draw.measured import measured_graphs
from suite.results.schema import Cell, Status
from suite.results.store import REPOSITORY, read_run

pytestmark = pytest.mark.gpu

LIMIT_S = 240
"""Two minutes are the aim of --quick; a busy host takes longer."""


@pytest.mark.parametrize("workload", ["MMC", "DCGAN"])
def test_graph_drawing_contains_kernel_times(workload: str) -> None:
    graphs = measured_graphs(workload, variant=None, size="tiny", seed=0, say=print)
    timed = [one for one in graphs if one.times_us is not None]
    assert timed, "no graph was found in the profile"
    assert all(us > 0 for us in timed[0].times_us or ())
    lines = [launch.source_line for launch in timed[0].concurrency.order if launch.source_line is not None]
    assert any(".py:" in line for line in lines)


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("name", ["inference", "training", "training_with_dropout", "trainer"])
def test_quick_run_of_a_program_ends_with_figures(name: str, tmp_path: Path) -> None:
    command = (sys.executable, "-P", str(REPOSITORY / "encore" / "own_packages.py"), "suite")
    begun = time.monotonic()
    done = subprocess.run(
        [*command, "run", f"own_programs:{name}", "--quick", "--out", str(tmp_path / "run")],
        cwd=REPOSITORY / "tests" / "support",
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S - 10,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stderr[-2000:], f"{time.monotonic() - begun:.0f} s")
    assert "4 of 4 cells passed" in done.stderr
    lines = dict(line.strip().split(": ", 1) for line in done.stdout.splitlines()[1:])
    for subject in ("over compile", "over stock's graphs"):
        assert lines[subject].startswith("Encore is "), lines
    assert "at most while replaying" in lines["memory"]
    assert "settled after" in lines["start"]
    assert "not measured" not in lines["not captured"]
    assert time.monotonic() - begun < LIMIT_S


def tiny_run(
    folder: Path, workloads: Sequence[str], modes: Sequence[str], processes: int
) -> tuple[dict[tuple[str, str], Cell], str]:
    """Return the rows of a run at tiny size by workload and mode, all of which passed, and its output."""
    options = ["--size", "tiny", "--blocks", "5", "--measure-s", "1", "--timeout", "3m"]
    options += ["--processes", str(processes), "--modes", ",".join(modes)]
    command = [sys.executable, "-P", "-m", "suite", "run", *workloads, *options, "--out", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    cells = {(cell.workload, cell.mode): cell for cell in read_run(folder).cells}
    assert len(cells) == len(workloads) * len(modes)
    return cells, done.stdout + done.stderr


@pytest.mark.timeout(420)
def test_each_mode_compiles_once_and_three_have_trials(tmp_path: Path) -> None:
    modes = ("eager", "compile", "graph", "graph-unpartitioned", "lean", "encore")
    cells, said = tiny_run(tmp_path / "run", ("DGPT2", "DR-T"), modes, processes=2)
    assert "could not be tried apart" not in said
    for (workload, mode), cell in cells.items():
        assert cell.status is Status.PASS and cell.correctness is not None, (workload, mode, cell.error)
        assert cell.correctness.fallback_random == (mode != "eager"), (workload, mode)
        assert cell.device == "cuda" and all(block.device_us for block in cell.blocks), (workload, mode)
        # Where atomics add, what varies may have been seen by one process and not by another, which then tries itself.
        if mode in ("graph-unpartitioned", "lean") and workload == "DR-T":
            assert f"{workload} {mode}: compare" not in said  # who is tried by its own process compares, and says so
            others = [cells[workload, other].correctness for other in ("compile", "graph", "encore")]
            assert cell.correctness.digests in [other.digests for other in others if other is not None]


# `host_tuning check` on a machine with a GPU. Reads only: nothing of the machine is changed here.


def test_gpu_properties_equal_those_of_torch() -> None:
    facts = Nvml().facts()
    assert facts is not None
    assert facts.name == torch.cuda.get_device_properties(0).name
    assert facts.sm_clock_mhz and facts.highest_sm_clock_mhz and facts.sm_clock_mhz <= facts.highest_sm_clock_mhz
    assert Nvml().facts(999) is None


def test_every_item_of_the_gpu_has_a_finding() -> None:
    findings = {finding.item: finding for finding in check()}
    assert {"numa", "gpu_processes", "gpu_clock", "gpu_persistence", "gpu_throttling"} <= set(findings)
    assert findings["gpu_processes"].verdict in (Disturbance.OK, Disturbance.WARN)
    assert "MHz now" in findings["gpu_clock"].value
