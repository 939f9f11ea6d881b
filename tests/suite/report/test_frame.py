"""`suite.load` gives a run as a DataFrame, and its example in the documents works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from fixtures.synthetic_results import cell, environment, failed_cell, write_run

import suite
from suite.results.schema import Status
from suite.results.store import REPOSITORY


@pytest.fixture
def run(tmp_path: Path) -> Path:
    cells = [cell("EOS", "compile", 100), cell("EOS", "graph", 80), cell("EOS", "encore", 50)]
    return write_run(tmp_path / "run", [*cells, failed_cell("ST", "encore", Status.CRASH)], environment())


def test_frame_has_a_line_for_each_workload_and_mode(run: Path) -> None:
    frame = suite.load(run).set_index(["workload", "mode"])
    row = frame.loc["EOS", "encore"]
    assert (row.commit, row.device, row.host_us, row.processes, row.status, row.batch, row.settled) == (
        "0123456789", "SYNTHETIC GPU", 50.0, 3, "pass", 1, True,
    )  # fmt: skip
    assert row.over_compile == pytest.approx(2, rel=0.01) and row.over_graph == pytest.approx(1.6, rel=0.01)
    assert row.coverage_percent > 0 and row.peak_reserved_bytes > 0 and row.first_call_s == 4.0
    assert row.over_compile_low <= row.over_compile <= row.over_compile_high
    assert pd.isna(frame.loc["EOS", "compile"].over_compile)
    failed = frame.loc["ST", "encore"]
    assert failed.status == "crash" and pd.isna(failed.host_us) and pd.isna(failed.cuda_graphs) and failed.error
    assert frame.host_us.dtype == float and len(frame) == 4


def test_frame_of_samples_has_a_line_for_each_iteration(run: Path) -> None:
    frame = suite.load(str(run), samples=True)
    assert len(frame) == 3 * 3 * 6 * 3, "modes, processes, blocks, samples"
    medians = frame.groupby("mode").host_us.median()
    assert dict(medians) == {"compile": 100.0, "graph": 80.0, "encore": 50.0}
    assert (frame.device_us == frame.host_us - 1).all()


def test_example_of_the_results_page_runs(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
    (example,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "suite.load" in code)
    run = write_run(tmp_path / "run", [cell("XLNET-I", mode) for mode in ("compile", "graph", "encore")], environment())
    script = tmp_path / "example.py"
    script.write_text(example.replace('"RUN"', repr(str(run))))
    told = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=told)
    assert done.returncode == 0, done.stderr
    assert "over_graph" in done.stdout and "placeholder_bytes" in done.stdout and "XLNET-I" in done.stdout
