"""Training programs of libraries are compared with eager and run one after another."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from row_files import RowFile
from step_parts import Program, batches, loss_of, network

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import library_steps
from library_programs import compare, record

from tests.judges.test_judges import WORKER


def training(device: str, *, rates: bool = False) -> Program:
    torch.manual_seed(0)
    model = network(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.07, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.93)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def between(index: int) -> None:
        if rates:
            scheduler.step()

    return Program(step, batches(device, record.CALLS), lambda: model.parameters(), between)


def test_tensor_learning_rates_are_found_as_the_reason() -> None:
    found = compare.row("rates", lambda device: training(device, rates=True), "cpu")
    assert found["verdict"] == compare.RATES and found["from_call"] in range(8) and 0 < found["far"] < 1e-5


def test_existing_rows_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["--out", str(out), "--device", "cpu", "--only", "factorization_with_dense", "maml_by_vmap"]
    names = ["maml_by_vmap_of_grad", "matrix_factorization_with_dense_gradients"]
    out.write_text(json.dumps({"name": names[0], "verdict": library_steps.ENDED, "code": -11}) + "\n")
    assert library_steps.main(arguments) == 1
    first, second = map(json.loads, out.read_text().splitlines())
    assert first["code"] == -11 and second["name"] == names[1] and second["verdict"] == compare.EQUAL
    assert f"{names[0]}: ended the process: -11" in capsys.readouterr().out


def test_program_that_ends_its_process_has_a_row(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    given = library_steps._parser().parse_args(["--device", "cpu", "--out", str(out)])
    rows = RowFile(None, lambda row: True)
    library_steps.run(["fine", "crash step"], rows, given, worker=("-c", WORKER))
    assert [one.get("verdict") for one in rows.rows] == ["equal", library_steps.ENDED]
    assert rows.rows[1]["name"] == "crash step" and "exit code 3" in rows.rows[1]["code"]
