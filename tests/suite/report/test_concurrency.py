"""The exhibit of kernels side by side: whole iterations of two modes, and what the proof on a GPU found."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.synthetic_results import cell

from suite.report.chart import Chart, draw
from suite.report.grid import NOT_MEASURED
from suite.report.paper.speedups import read_proof
from suite.results.errors import WrongUse
from tests.suite.report.test_paper import made, results, row


def proof_row(workload: str, **changes: object) -> dict[str, object]:
    row: dict[str, object] = {"phase": "measure", "workload": workload, "status": "ok"}
    return {**row, "recordings": [{}, {}], "run": {"device": "SYNTHETIC GPU"}, **changes}


def test_concurrency_shows_iterations_and_proved_graphs(tmp_path: Path) -> None:
    path = tmp_path / "proof.jsonl"
    times = {"decisions": [{"winner": "branches"}, {"winner": "chain"}], "bits": {"equal": True}}
    proved = [
        {"phase": "chain", "workload": "EOS", "status": "ok", "reserved_bytes": 100},
        {"phase": "branches", "workload": "EOS", "status": "ok", "reserved_bytes": 102},
        proof_row("EOS", times={"gain": 1.2}, **times),
        proof_row("MMC/current", times={"gain": 0.8}, **{**times, "bits": {"equal": False}}),
        proof_row("ST"),
        {"phase": "measure", "workload": "TKE", "status": "failed", "error": "out of memory"},
    ]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in proved))
    rows = [cell("EOS", "lean", 100), cell("EOS", "lanes", 80), cell("VM", "lanes", 80, variant="current")]
    done = made("concurrency", replace(results(*rows), proved=read_proof(path)))
    assert isinstance(done.chart, Chart)
    assert done.chart.bars["EOS", "lanes"].value == pytest.approx(1.25)
    assert done.chart.bars["EOS", "graphs alone"].value == pytest.approx(1.2)
    assert done.chart.bars["ST", "graphs alone"].failure == "each kernel needs the one before it"
    assert done.chart.bars["geomean", "graphs alone"].value == pytest.approx(math.sqrt(0.96))
    found = row(done, "EOS")
    assert [found[name] for name in ("graphs", "branched", "same_bits", "memory_ratio")] == [2, 1, True, 1.02]
    assert row(done, "MMC (current)")["graphs_alone_speedup"] == pytest.approx(0.8)
    assert "VM (current)" in set(done.table.frame["workload"])
    assert [point.measured for point in done.points][-2:] == ["1.10 of 2, SYNTHETIC GPU", "1 of 2"]
    assert draw(done.chart, done.provenance).axes


def test_concurrency_without_rows_is_not_measured() -> None:
    done = made("concurrency", results(cell("EOS", "lean", 100)))
    assert done.chart is None
    assert {point.measured for point in done.points} == {NOT_MEASURED}


@pytest.mark.parametrize("text", ["{}", "no JSON", json.dumps(proof_row("EOS", recordings=None))])
def test_file_that_is_no_proof_is_wrong_use(tmp_path: Path, text: str) -> None:
    path = tmp_path / "proof.jsonl"
    path.write_text(text)
    with pytest.raises(WrongUse, match=r"no rows of tests/gpu/concurrency_proof\.py"):
        read_proof(path)
