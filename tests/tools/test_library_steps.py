"""What compares training programs of libraries with eager, and runs them one after another."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from step_parts import CAPTURE_CHECK, Program, batches, loss_of, network

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import library_steps
from library_programs import compare, record


def training(device: str, *, asks: bool = False, rates: bool = False) -> Program:
    torch.manual_seed(0)
    model = network(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.07, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.93)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model, batch)
        if asks:
            if torch.cuda.is_current_stream_capturing():
                loss = loss * 1.5
            elif loss.item() > 1e9:  # a graph repeats nothing of this
                loss = loss * 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def between(index: int) -> None:
        if rates:
            scheduler.step()

    return Program(step, batches(device, record.CALLS), lambda: model.parameters(), between)


def test_a_program_that_is_replayed_is_equal() -> None:
    found = compare.row("plain", training, "cpu")
    assert found["verdict"] == compare.EQUAL and found["replays"] >= 10 and found["differ"] == 0


def test_rates_that_are_tensors_are_found_to_be_the_reason() -> None:
    found = compare.row("rates", lambda device: training(device, rates=True), "cpu")
    assert found["verdict"] == compare.RATES and found["from_call"] in range(8) and 0 < found["far"] < 1e-5


def test_being_told_of_a_capture_is_found_to_be_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU, an optimizer that is told so raises, if it is not `capturable`."""
    monkeypatch.setattr("torch.cuda.graphs._cuda_isCurrentStreamCapturing", lambda: False)

    def check(self: torch.optim.Optimizer) -> None:
        asked.append(torch.cuda.is_current_stream_capturing())
        if asked[-1] and not all(group["capturable"] for group in self.param_groups):
            raise RuntimeError("capturable is False")

    asked: list[bool] = []
    check.__code__ = check.__code__.replace(
        co_filename=torch.optim.lr_scheduler.__file__
    )  # it gets the true answer there
    monkeypatch.setattr(torch.optim.Optimizer, CAPTURE_CHECK, check)
    found = compare.row("asks", lambda device: training(device, asks=True), "cpu")
    assert found["verdict"] == compare.TOLD and found["told"] and found["far"] > 1e-4 and asked


def test_what_nothing_explains_differs() -> None:
    """Each program that is made here begins elsewhere, but the first two, which are eager's."""
    made = itertools.count()

    def make(device: str) -> Program:
        program = training(device)
        with torch.no_grad():
            next(iter(program.state())).mul_(1 + max(0, next(made) - 1))
        return program

    assert compare.row("other", make, "cpu")["verdict"] == compare.DIFFERS


def test_what_eager_does_not_repeat_either_is_near() -> None:
    made = itertools.count()

    def make(device: str) -> Program:
        program = training(device)
        with torch.no_grad():
            next(iter(program.state())).add_(1e-4 * next(made))
        return program

    found = compare.row("noisy", make, "cpu")
    assert found["verdict"] == compare.NEAR and found["spread"] > 0


def test_errors_are_told_apart() -> None:
    def missing(device: str) -> Program:
        import a_library_that_is_not_there  # noqa: F401

        raise AssertionError

    assert compare.row("missing", missing, "cpu")["verdict"] == compare.NOT_RUN
    made = itertools.count()

    def only_in_eager(device: str) -> Program:
        if next(made) == 2:
            raise RuntimeError("of the third that is made")
        return training(device)

    found = compare.row("step", only_in_eager, "cpu")
    assert found["verdict"] == compare.FAILS and "of the third" in found["error"]


@pytest.mark.parametrize(
    ("mine", "theirs", "worst", "tensors"),
    [
        ([torch.ones(2)], [torch.ones(2)], 0.0, 0),
        ([torch.tensor([1.0, 2.5])], [torch.tensor([1.0, 2.0])], 0.25, 1),
        ([torch.tensor([float("nan")])], [torch.tensor([float("nan")])], 0.0, 0),
        ([torch.tensor([float("nan")])], [torch.ones(1)], float("inf"), 1),
        ([torch.ones(2)], [torch.ones(3)], float("inf"), 1),
        ([torch.ones(2)], [torch.ones(2, dtype=torch.float64)], 0.0, 1),
        ([torch.ones(2)], [], float("inf"), 1),
    ],
)
def test_distances(mine: list[torch.Tensor], theirs: list[torch.Tensor], worst: float, tensors: int) -> None:
    assert compare.distance(mine, theirs) == compare.Distance(worst, tensors)


def test_all_programs_are_known_by_their_names() -> None:
    assert len(record.programs()) >= 130


def test_rows_are_written_and_what_is_there_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["--out", str(out), "--device", "cpu", "--only", "factorization_with_dense", "maml_by_vmap"]
    names = ["maml_by_vmap_of_grad", "matrix_factorization_with_dense_gradients"]
    out.write_text(json.dumps({"name": names[0], "verdict": library_steps.ENDED, "code": -11}) + "\n")
    assert library_steps.main(arguments) == 1
    first, second = map(json.loads, out.read_text().splitlines())
    assert first["code"] == -11 and second["name"] == names[1] and second["verdict"] == compare.EQUAL
    assert f"{names[0]}: ended the process: -11" in capsys.readouterr().out


def test_a_program_that_ends_its_process_has_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys\n"
        "for name in sys.argv[sys.argv.index('--worker') + 1 :]:\n"
        "    if name == 'ends': os._exit(3)\n"
        "    if name == 'waits': __import__('time').sleep(60)\n"
        "    print(json.dumps({'name': name, 'verdict': 'equal'}), flush=True)\n"
    )
    monkeypatch.setattr(library_steps, "__file__", str(script))
    found = list(library_steps._found(["a", "ends", "b", "waits", "c"], "cpu", 3.0))
    assert [one["name"] for one in found] == ["a", "ends", "b", "waits", "c"]
    assert [one["verdict"] for one in found] == ["equal", "ended the process"] * 2 + ["equal"]
    assert [one["code"] for one in found if "code" in one] == [3, -9]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "nothing like it", "--out", "rows"], "no program has 'nothing like it' in its name"),
        (["--device", "cpu"], "--out needs a file"),
        (["--device", "cpu", "--out", "rows", "--part", "4/4"], "write I/N"),
        (["--table", "not there"], "cannot be read as rows"),
    ],
)
def test_wrong_use(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        library_steps.main(arguments)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_the_table_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [
        {"name": "a", "verdict": compare.EQUAL, "replays": 11},
        {"name": "b", "verdict": compare.EQUAL, "replays": 11},
        {"name": "c", "verdict": compare.NEAR, "replays": 0},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert library_steps.main(["--table", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == ["| 2 | yes | equal |", "| 1 | no | within four times eager's own spread |"]
    file.write_text(json.dumps({"name": "d", "verdict": compare.DIFFERS, "replays": 3, "far": 0.5}) + "\n")
    assert library_steps.main(["--table", str(file)]) == 1
    assert "d: differs: 0.5" in capsys.readouterr().out
