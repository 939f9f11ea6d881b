"""Rows of runs: as a DataFrame from `suite.load`, in the history of runs removed from git, and in `encore record`."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from fixtures.fake_command import run_command
from fixtures.synthetic_results import cell, environment, failed_cell, write_run
from pandas.testing import assert_frame_equal

import suite
from suite.report import frame
from suite.report.frame import read_history, rows_frame, write_history
from suite.report.history.lines import directions, lines_of
from suite.report.history.recording import PAGE, listing, record_run
from suite.report.runs import load_run
from suite.results import store
from suite.results.errors import WrongUse
from suite.results.schema import Status
from suite.results.store import REPOSITORY, list_runs

PAGE_TEXT = "# Recorded\n\n<!-- generated: recorded -->\n<!-- end: recorded -->\n"


def a_run(folder: Path, run_id: str = "first", day: int = 1) -> Path:
    """EOS in three modes, of which `encore` is twice as fast as `compile`, and ST, which crashed."""
    of = environment(run_id=run_id, created_at=f"2026-01-0{day}T00:00:00+00:00")
    cells = [cell("EOS", "compile", 100), cell("EOS", "graph", 80), cell("EOS", "encore", 50)]
    return write_run(folder / run_id, [*cells, failed_cell("ST", "encore", Status.CRASH)], of)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recorded runs with its page, in place of the repository's."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    (folder / PAGE).write_text(PAGE_TEXT)
    monkeypatch.setattr(store, "RECORDED", folder)
    monkeypatch.setattr(store, "RUNS", tmp_path)
    monkeypatch.setattr(frame, "HISTORY", tmp_path / "history.csv")
    return folder


def sorted_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows as a history file has them."""
    return rows[list(frame.HISTORY_COLUMNS)].sort_values(["workload", "mode"]).reset_index(drop=True)


def test_history_file_reads_back_and_holds_each_row_once(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    assert len(read_history(path)) == 0
    made = rows_frame(load_run(a_run(tmp_path)))
    write_history([made, made], path)
    assert_frame_equal(read_history(path), sorted_rows(made))


@pytest.mark.parametrize(("old", "new"), [("processes", "process"), (",50,", ",fifty,")])
def test_damaged_history_is_wrong_use(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "history.csv"
    write_history([rows_frame(load_run(a_run(tmp_path)))], path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(WrongUse, match=r"history\.csv"):
        read_history(path)


def test_recorded_run_is_packed_without_sketches(tmp_path: Path, recorded: Path) -> None:
    plain = cell("EOS", "compile")
    assert plain.correctness is not None
    sketched = plain.correctness.model_copy(update={"varying": [{"out": [1.0]}]})
    run = write_run(tmp_path / "run", [plain.model_copy(update={"correctness": sketched})], environment(run_id="run"))
    folder = record_run(run, recorded, tmp_path / "history.csv")
    assert folder == recorded / "run" and run.exists()
    assert list(read_history(tmp_path / "history.csv")["run"]) == ["run"]
    (line,) = gzip.decompress((folder / store.PACKED).read_bytes()).splitlines()
    assert json.loads(line)["correctness"]["varying"] is None
    (read,) = store.read_run(folder).cells
    assert read.blocks == plain.blocks
    with pytest.raises(WrongUse, match="recorded once"):
        record_run(run, recorded, tmp_path / "history.csv")


def test_damaged_run_is_not_recorded(tmp_path: Path, recorded: Path) -> None:
    run = a_run(tmp_path)
    (run / store.CELLS).write_bytes((run / store.CELLS).read_bytes()[:-20])
    with pytest.raises(WrongUse, match="is damaged"):
        record_run(run, recorded, tmp_path / "history.csv")


def test_record_command_packs_a_run_and_renews_the_page(tmp_path: Path, recorded: Path) -> None:
    run = a_run(tmp_path, "new", day=2)
    for arguments in ([str(run)], []):
        done = run_command(("record", *arguments))
        assert done.returncode == 0, done.stderr
        page = (recorded / PAGE).read_text()
        row = "| `new` | `encore run` | SYNTHETIC GPU | 0123456789 | EOS, ST | compile, graph, encore | 3 |"
        assert (row in page) is bool(arguments) and listing(recorded) in page
        shutil.rmtree(recorded / "new", ignore_errors=True)
    assert set(read_history(tmp_path / "history.csv")["run"]) == {"new"}, "the rows of a deleted run stay"


def a_row(
    workload: str, commit: str, day: int, ratio: tuple[float, float, float] | None, **changes: object
) -> dict[str, object]:
    """Make a row of mode `encore` with this speed-up over `graph`."""
    value, low, high = ratio or (None, None, None)
    fields = {
        "run": f"run-{day}", "created_at": f"2026-01-{day:02}T00:00:00", "commit": commit, "device": "GPU A",
        "torch": "0.0", "driver": "1", "workload": workload, "mode": "encore", "status": "pass", "processes": 3,
        "host_us": 100.0, "kernel_us": None, "over_compile": None, "over_compile_low": None,
        "over_compile_high": None, "over_graph": value, "over_graph_low": low, "over_graph_high": high,
    }  # fmt: skip
    return fields | changes


ROWS = pd.DataFrame(
    [
        a_row("EOS", "1" * 10, 1, (1.40, 1.38, 1.42)),
        a_row("ST", "2" * 10, 2, (1.10, 1.00, 1.20)),
        a_row("EOS", "2" * 10, 3, (1.20, 1.18, 1.22)),
        a_row("EOS", "3" * 10, 4, None),
        a_row("ST", "4" * 10, 5, (1.20, 1.10, 1.30)),
        a_row("ST", "5" * 10, 1, (9.0, 9.0, 9.0), device="GPU B"),
    ]
)


def test_history_has_a_line_for_each_workload() -> None:
    found = lines_of(ROWS, "encore", "graph", None, last=10)
    assert found.device == "GPU A", "that of the newest run"
    assert [one["commit"] for one in found.commits] == ["1111111", "2222222", "4444444"]
    assert [one["date"] for one in found.commits] == ["2026-01-01", "2026-01-02", "2026-01-05"]
    assert found.workloads == {
        "EOS": ((1.40, 1.38, 1.42), (1.20, 1.18, 1.22), None),
        "ST": (None, (1.10, 1.00, 1.20), (1.20, 1.10, 1.30)),
    }
    assert directions(found.workloads["EOS"]) == (0, -1, 0)
    assert directions(found.workloads["ST"]) == (0, 0, 0), "intervals meet"
    assert [one["commit"] for one in lines_of(ROWS, "encore", "graph", None, last=1).commits] == ["4444444"]
    assert list(lines_of(ROWS, "encore", "graph", "gpu b", last=1).workloads) == ["ST"]


@pytest.mark.parametrize(
    ("mode", "over", "device", "words"),
    [
        ("lean", "graph", None, "known: encore"),
        ("encore", "eager", None, "compile and graph"),
        ("encore", "graph", "GPU", "names 2 devices; known: GPU A, GPU B"),
        ("encore", "graph", "C", "names no devices"),
    ],
)
def test_history_of_an_unknown_name_is_refused(mode: str, over: str, device: str | None, words: str) -> None:
    with pytest.raises(WrongUse, match=words):
        lines_of(ROWS, mode, over, device, last=10)


def test_history_command_adds_own_runs_and_draws(tmp_path: Path, recorded: Path) -> None:
    write_history([ROWS], tmp_path / "history.csv")
    picture = tmp_path / "history.png"
    done = run_command(("history", str(a_run(tmp_path, day=9)), "--figure", str(picture)))
    assert done.returncode == 0
    printed = done.stdout
    assert "EOS" in printed and "0123456" in printed, "the device of the newest row, which is of the own run"
    assert "1.60" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_recorded_run_is_in_the_history() -> None:
    """One of them is read whole: its rows are those of the run."""
    kept = read_history(frame.HISTORY)
    assert {path.name for path in list_runs(store.RECORDED)} <= set(kept["run"])
    smallest = store.RECORDED / "20261127-182742-h200"
    own = kept[kept["run"] == smallest.name].reset_index(drop=True)
    assert_frame_equal(own, sorted_rows(rows_frame(load_run(smallest))))


def test_frame_has_a_line_for_each_workload_and_mode(tmp_path: Path) -> None:
    frame = suite.load(a_run(tmp_path)).set_index(["workload", "mode"])
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


def test_frame_of_samples_has_a_line_for_each_iteration(tmp_path: Path) -> None:
    frame = suite.load(str(a_run(tmp_path)), samples=True)
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
