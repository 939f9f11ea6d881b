"""Stochastic workloads are tried by processes that are not measured, and modes between have the bits of those tried."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from suite.schema import Cell, Status

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
MODES = ("eager", "compile", "graph", "graph-unpartitioned", "lean", "encore")


def test_each_mode_compiles_once_and_three_are_tried_elsewhere(tmp_path: Path) -> None:
    options = ["--size", "tiny", "--blocks", "5", "--measure-s", "1", "--timeout", "3m"]
    options += ["--processes", "2", "--most-processes", "2", "--modes", ",".join(MODES)]
    command = [sys.executable, "-P", "-m", "suite", "run", "DGPT2", "DR-T", *options]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], cwd=ROOT, text=True, capture_output=True, timeout=400, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert "could not be tried apart" not in said
    lines = (tmp_path / "run" / "cells.jsonl").read_text().splitlines()
    cells = {(one.workload, one.mode): one for one in (Cell.model_validate(json.loads(line)) for line in lines)}
    assert len(cells) == 2 * len(MODES)
    for (workload, mode), cell in cells.items():
        assert cell.status is Status.PASS and cell.correctness is not None, (workload, mode, cell.error)
        assert cell.correctness.fallback_random == (mode != "eager"), (workload, mode)
        if mode in ("graph-unpartitioned", "lean"):  # who is tried by its own process compares, and says so
            assert f"{workload} {mode}: compare" not in said
            others = [cells[workload, other].correctness for other in ("compile", "graph", "encore")]
            assert cell.correctness.digests in [other.digests for other in others if other is not None]
