"""Test the rows and the text that are made of the suite's runs of TorchBench's models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures.synthetic_results import cell, failed_cell, metrics, write_run

from judges import torchbench
from judges.__main__ import main
from suite.results.schema import HostUse, Status

QUIET, BUSY = (HostUse(cpu_cores=cores, gpus_at_work=0) for cores in (0.1, 5.0))


def rows_of(tmp_path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    kernels = metrics().model_copy(update={"kernels": {"triton_poi_add 1x1x1 32x1x1": 3, "gemm 8x1x1 64x1x1": 1}})
    part = [
        cell("torchbench:one", "compile", 100.0, metrics=kernels),
        cell("torchbench:one", "encore", 50.0, metrics=kernels),
        cell("torchbench:two", "compile", 10.0, metrics=kernels),
        failed_cell("torchbench:two", "encore", Status.FAIL_ACCURACY, "other values\nin detail"),
        failed_cell("torchbench:three", "compile", Status.MODEL_FAIL_TO_LOAD, "ModuleNotFoundError: no such module"),
    ]
    timed = [
        cell("torchbench:one", "eager", 300.0, others=QUIET),
        cell("torchbench:one", "compile", 80.0, metrics=kernels, others=QUIET),
        cell("torchbench:one", "graph", 70.0, metrics=kernels, others=BUSY),
        cell("torchbench:one", "encore", 40.0, metrics=kernels, others=QUIET),
    ]
    out = tmp_path / "out"
    write_run(out / "part", part)
    write_run(out / "run", timed)
    assert main(["torchbench", str(out)]) == 1, "one fails under Encore and passes under plain compile"
    first, *rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert first["run"]["device"] == "SYNTHETIC GPU"
    assert "torchbench|two: fail_accuracy: other values" in (out / "summary.txt").read_text()
    return {(row["task"], row["compiler"]): row for row in rows if "task" in row}


def test_rows_have_results_kernels_and_times(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    assert rows.keys() == {
        ("torchbench|one", "compile"), ("torchbench|one", "stock"), ("torchbench|one", "encore"),
        ("torchbench|two", "compile"), ("torchbench|two", "encore"), ("torchbench|three", "eager"),
    }  # fmt: skip
    one = rows["torchbench|one", "encore"]
    assert one["passed"] and (one["kernels"], one["generated"]) == (4, 3)
    assert one["over_compile"][0] == pytest.approx(2.0, rel=0.05)
    assert one["others_cores"] == 0.1 and rows["torchbench|one", "stock"]["others_cores"] == 5.0
    two = rows["torchbench|two", "encore"]
    assert not two["passed"] and two["wrong"] == "fail_accuracy: other values"
    assert rows["torchbench|three", "eager"]["skipped"].startswith("model_fail_to_load: ModuleNotFoundError")


def test_brief_has_kernels_graphs_and_times_of_each_model(tmp_path: Path) -> None:
    brief = torchbench.brief(list(rows_of(tmp_path).values()))
    assert "one 4/75/" in brief and "up to 5.0 cores: one 1." in brief
    for name in ("Stock's graphs", "Encore"):
        assert f"{name}: 1 of 1 timed are faster than plain compile by the interval of blocks, slower none." in brief
