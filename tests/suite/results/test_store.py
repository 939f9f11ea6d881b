"""Runs on disk: whole lines in all cases, and only data that matches the schema is read."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
from pathlib import Path

import pytest
from fixtures.synthetic_results import cell, environment, failed_cell

from suite.results import store
from suite.results.errors import EXIT_WRONG_USE, WrongUse
from suite.results.run_writer import RunWriter
from suite.results.schema import Cell, Environment, Status
from suite.results.store import InvalidResults, find_run, read_run, write_atomically
from suite.settings import FULL, RunPlan

PLAN = RunPlan.model_validate({**FULL.settings.model_dump(), "workloads": ["EOS", "ST"], "modes": ["compile", "graph"]})


def make_run(path: Path, *cells: Cell, record: Environment | None = None) -> Path:
    with RunWriter.create(path, record or environment(settings=PLAN.model_dump())) as writer:
        for each in cells:
            writer.append(each)
    return path


def test_cells_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    cells = (cell("EOS", "compile"), failed_cell("EOS", "graph", Status.TIMEOUT))
    run = read_run(make_run(tmp_path / "run", *cells))
    assert run.cells == cells
    assert run.environment == environment(settings=PLAN.model_dump())
    assert run.missing() == [("ST", "compile"), ("ST", "graph")]


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
def test_missing_numbers_are_preserved(error: float) -> None:
    from fixtures.synthetic_results import correctness

    made = cell(correctness=correctness().model_copy(update={"max_relative_error": error}))
    text = made.model_dump_json()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    read = Cell.model_validate_json(text).correctness
    assert read is not None
    assert repr(read.max_relative_error) == repr(error)


@pytest.mark.parametrize("damage", [b'{"workload": "EOS', b"", b"\0" * 40, b"\xff\xfe", b"<<<<<<< HEAD"])
def test_damaged_line_names_the_remedy(tmp_path: Path, damage: bytes) -> None:
    path = make_run(tmp_path / "run", cell("EOS", "compile"), cell("EOS", "graph"))
    first, second = (path / "cells.jsonl").read_bytes().splitlines()
    (path / "cells.jsonl").write_bytes(b"\n".join([first, damage, second, b""]))
    with pytest.raises(InvalidResults, match=r"line 2 is damaged: .*take it away"):
        read_run(path)
    (path / "cells.jsonl").write_bytes(b"\n".join([first, second, b""]))
    assert len(read_run(path).cells) == 2
    (path / "environment.json").write_bytes(damage)
    with pytest.raises(InvalidResults, match=r"environment\.json is damaged: .*restore it"):
        read_run(path)


def test_packed_rows_are_read_and_not_resumed(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", cell("EOS", "compile"), cell("EOS", "graph"))
    plain = read_run(path)
    subprocess.run(["gzip", "-9n", str(path / store.CELLS)], check=True)
    assert read_run(path) == plain and len(plain.cells) == 2
    with pytest.raises(WrongUse, match=r"is packed; `gunzip .*cells\.jsonl\.gz`, then go on"):
        RunWriter.reopen(path)
    (path / store.CELLS).write_text("")
    with pytest.raises(InvalidResults, match=r"has both cells\.jsonl and cells\.jsonl\.gz"):
        read_run(path)


@pytest.mark.parametrize(("kept_bytes", "then"), [(-9, b""), (0, b""), (0, b"rows"), (30, b"!" * 9)])
def test_damaged_packed_rows_are_reported(tmp_path: Path, kept_bytes: int, then: bytes) -> None:
    path = make_run(tmp_path / "run", cell("EOS", "compile"))
    whole = gzip.compress((path / store.CELLS).read_bytes())
    (path / store.CELLS).unlink()
    (path / store.PACKED).write_bytes(whole[:kept_bytes] + then)
    with pytest.raises(InvalidResults, match=r"cells\.jsonl\.gz is damaged: "):
        read_run(path)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda fields: fields.pop("status"), "field 'status'"),
        (lambda fields: fields.update(status="fine"), "field 'status'"),
        (lambda fields: fields.update(schema_version=99), "schema version 99"),
        (lambda fields: fields["blocks"][0].update(host_us="fast"), "blocks.0.host_us"),
        (lambda fields: fields["blocks"][0].update(host_us=[5.0, 0.0]), "blocks.0.host_us.1"),
        (lambda fields: fields["blocks"][0].update(host_us=["Infinity"]), "blocks.0.host_us.0"),
    ],
)
def test_wrong_fields_are_refused_with_file_and_line(tmp_path: Path, edit: object, words: str) -> None:
    path = make_run(tmp_path / "run", cell("EOS", "compile"), cell("EOS", "graph"))
    first, second = (path / store.CELLS).read_text().splitlines()
    fields = json.loads(second)
    edit(fields)  # type: ignore[operator]
    (path / store.CELLS).write_text(f"{first}\n{json.dumps(fields)}\n")
    with pytest.raises(InvalidResults, match=r"cells\.jsonl line 2: ") as caught:
        read_run(path)
    assert words in str(caught.value)
    assert caught.value.exit_code == EXIT_WRONG_USE


def test_last_row_of_a_cell_counts(tmp_path: Path) -> None:
    bad, good = failed_cell("EOS", "graph", Status.CRASH), cell("EOS", "graph")
    path = make_run(tmp_path / "run", bad, cell("EOS", "compile"), bad, good)
    assert read_run(path).cells == (cell("EOS", "compile"), good)
    assert read_run(make_run(tmp_path / "twice", good, bad)).cells == (bad,)


def test_run_is_not_created_over_existing_files(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", cell())
    with pytest.raises(WrongUse, match=r"is a run already.*--resume"):
        RunWriter.create(path, environment())
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    with pytest.raises(WrongUse, match="not an empty folder"):
        RunWriter.create(tmp_path / "folder", environment())
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("written", [0, 10, None])
def test_full_disk_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int | None
) -> None:
    path = make_run(tmp_path / "run", cell("EOS", "compile"))
    before = (path / store.CELLS).read_bytes()
    writer, _ = RunWriter.reopen(path)
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if written is None:  # a short write, as a disk that fills up in the middle gives it
            return real(descriptor, data[:50])
        real(descriptor, data[:written])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)
    with writer, pytest.raises(OSError, match=r"No space left.*cells\.jsonl"):
        writer.append(cell("EOS", "graph"))
    assert (path / store.CELLS).read_bytes() == before


def test_failed_atomic_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left.*{path}"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_file_where_a_folder_should_be_is_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "result.json", tmp_path / "file" / "below" / "result.json"):
        with pytest.raises((FileExistsError, NotADirectoryError)):
            write_atomically(path, "new")
    assert (tmp_path / "file").read_text() == "mine"


def test_runs_are_found_by_name_path_and_nearest_name(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make_run(runs / "20260101-h200")
    make_run(runs / "20260102-h200")
    assert find_run("20260101-h200", [runs]) == runs / "20260101-h200"
    assert find_run(str(runs / "20260101-h200"), []) == runs / "20260101-h200"
    with pytest.raises(WrongUse, match=r"unknown run '20260103-h200'; did you mean 2026010\d-h200"):
        find_run("20260103-h200", [runs])
    with pytest.raises(WrongUse, match="known: none yet"):
        find_run("anything", [tmp_path / "empty"])
    with pytest.raises(WrongUse, match=r"the folder has no environment\.json; known: none yet"):
        find_run(str(tmp_path), [tmp_path / "empty"])


def test_newest_run_is_the_last_created_readable_one(tmp_path: Path) -> None:
    make_run(tmp_path / "z", record=environment().model_copy(update={"created_at": "2026-01-01T00:00:00+00:00"}))
    make_run(tmp_path / "a", record=environment().model_copy(update={"created_at": "2026-02-01T00:00:00+00:00"}))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / store.ENVIRONMENT).write_text('{"schema_version": 0}')
    assert store.newest_run(tmp_path / "none", tmp_path) == tmp_path / "a"
    assert store.newest_run(tmp_path / "none") is None
