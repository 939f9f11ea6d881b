"""A disk that gets full: what was measured is saved, what is not yet measured is not begun. Note [Full disk]."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures.synthetic_results import cell, environment

from suite.results import store
from suite.results.run_writer import RESERVE, RESERVE_BYTES, UNSAVED, RunWriter
from suite.results.store import CannotWrite, read_run
from suite.settings import FULL, RunPlan

Write = Callable[[int, bytes], int]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    plan = RunPlan.model_validate(
        {**FULL.settings.model_dump(), "workloads": ["EOS", "ST"], "modes": ["compile", "graph"]}
    )
    with RunWriter.create(tmp_path / "run", environment(settings=plan.model_dump())) as writer:
        writer.append(cell("EOS", "compile"))
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(folder))
    return folder


def full_while(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[int], bool]) -> None:
    """A disk that has no room for a line while `is_full(descriptor)` holds."""
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if not is_full(descriptor):
            return real(descriptor, data)
        real(descriptor, data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)


def name_of(descriptor: int) -> str:
    return Path(f"/proc/self/fd/{descriptor}").readlink().name


def test_the_reserve_makes_room_for_every_row_of_the_workload(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, _ = RunWriter.reopen(run)
    with writer:
        writer.check_space()
        reserve = run / RESERVE
        assert reserve.stat().st_blocks * 512 >= RESERVE_BYTES, "the space must be taken, not only promised"
        full_while(monkeypatch, lambda descriptor: reserve.exists())
        for workload, mode in (("EOS", "graph"), ("ST", "compile"), ("ST", "graph")):
            writer.append(cell(workload, mode))
        with pytest.raises(CannotWrite, match=r"No space left.*--resume"):
            writer.check_space()
    assert len(read_run(run).cells) == 4
    assert not reserve.exists()


def test_a_run_without_room_for_a_workload_does_not_begin_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer, _ = RunWriter.reopen(run)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with writer, pytest.raises(CannotWrite, match="make room"):
        writer.check_space()


def test_rows_go_to_another_folder_if_the_whole_disk_is_full(
    run: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (run / store.CELLS).read_bytes()
    full_while(monkeypatch, lambda descriptor: "encore-" not in name_of(descriptor))
    writer, _ = RunWriter.reopen(run)
    with writer:
        writer.append(cell("ST", "compile"))
        writer.append(cell("ST", "graph"))
        with pytest.raises(CannotWrite, match=f"move that file to .*{UNSAVED}, then go on with"):
            writer.check_space()
    monkeypatch.undo()
    assert (run / store.CELLS).read_bytes() == before
    (saved,) = (run.parent / "temporary").iterdir()
    saved.rename(run / UNSAVED)
    writer, recorded = RunWriter.reopen(run)
    writer.close()
    assert [each.key[::3] for each in recorded.cells] == [("EOS", "compile"), ("ST", "compile"), ("ST", "graph")]
    assert read_run(run).cells == recorded.cells
    assert not (run / UNSAVED).exists()


def test_rows_that_were_saved_elsewhere_twice_are_taken_in_once(run: Path) -> None:
    """The disk was full, the cell was measured again without them, and the disk was full again."""
    rows = [cell("ST", "compile", host_us=1.0), cell("ST", "graph"), cell("ST", "compile", host_us=2.0)]
    (run / UNSAVED).write_text(store.lines_of(rows))
    writer, recorded = RunWriter.reopen(run)
    writer.close()
    assert [each.key[::3] for each in recorded.cells] == [("EOS", "compile"), ("ST", "compile"), ("ST", "graph")]
    assert recorded.cells[1] == rows[2]


def test_where_there_is_no_room_anywhere_nothing_is_left_behind(
    run: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name for path in run.iterdir()}
    full_while(monkeypatch, lambda descriptor: True)
    writer, _ = RunWriter.reopen(run)
    with writer, pytest.raises(CannotWrite, match="--resume"):
        writer.append(cell("ST", "compile"))
    assert {path.name for path in run.iterdir()} == before
    assert list(temporary.iterdir()) == []


def test_file_size_limit_leaves_the_rows_in_another_file(run: Path) -> None:
    before = (run / store.CELLS).read_bytes()
    code = """if True:
        import resource, signal, sys
        from pathlib import Path
        from fixtures.synthetic_results import cell
        from suite.results.run_writer import RunWriter
        from suite.results.store import CannotWrite
        writer, _ = RunWriter.reopen(Path(sys.argv[1]))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
        writer.append(cell("EOS", "graph"))
        try:
            writer.check_space()
        except CannotWrite as error:
            print(error)
            sys.exit(7)
    """
    path = os.pathsep.join((str(store.REPOSITORY / "tests" / "support"), str(store.REPOSITORY)))
    done = subprocess.run(
        [sys.executable, "-c", code, str(run), str(len(before) + 100)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 7, done.stderr
    assert (run / store.CELLS).read_bytes() == before
    writer, recorded = RunWriter.reopen(run)
    writer.close()
    assert [each.mode for each in recorded.cells] == ["compile", "graph"]


def test_only_a_run_is_said_to_be_gone_on_with(run: Path, tmp_path: Path) -> None:
    """`encore micro` and `encore report --only` write files, too, and have no --resume."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    in_run = store.write_error(run / store.CELLS, full)
    assert f"make room, then go on with `encore run --resume {run}`." in str(in_run)
    elsewhere = store.write_error(tmp_path / "indirection.json", full)
    assert isinstance(elsewhere, CannotWrite)
    assert str(elsewhere).endswith("What was written before is intact; make room, and give the command again.")
