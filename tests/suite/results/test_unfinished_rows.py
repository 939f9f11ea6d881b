"""Unfinished rows on disk: written, replaced, reported, joined and merged; and what a run that is ended leaves."""

from __future__ import annotations

import errno
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fixtures.bench import FOUR, Bench, bench, interrupted_once_it_hangs
from fixtures.synthetic_results import cell, environment, failed_cell, unfinished_cell, write_run

from suite.report import compare
from suite.report.runs import join_runs, load_run
from suite.report.two_runs.pairs import Outcome, compare_sides, find_side
from suite.results import run_writer, stats, store
from suite.results.run_writer import RESERVE, RunWriter
from suite.results.schema import Cell, Status
from suite.results.store import UNFINISHED, CannotWrite, read_run
from suite.run.merge import merge_runs
from suite.settings import FULL, RunPlan
from tests.suite.cli.test_cli import CPU, Fake, fake

__all__ = ["bench", "fake"]


@pytest.fixture
def writer(tmp_path: Path) -> RunWriter:
    return RunWriter.create(tmp_path / "run", environment())


ROWS = [unfinished_cell("EOS", mode) for mode in ("compile", "graph")]


def test_only_the_last_write_may_use_the_reserve(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    write = store.write_atomically
    writer.check_space()
    reserve = writer.path / RESERVE

    def full(path: Path, content: str) -> None:
        if reserve.exists():
            raise CannotWrite("the disk is full")
        write(path, content)

    monkeypatch.setattr("suite.results.run_writer.write_atomically", full)
    assert writer.keep_unfinished(ROWS) is False
    assert reserve.exists() and not (writer.path / UNFINISHED).exists()
    assert writer.keep_unfinished(ROWS, last=True) is True
    writer.close()
    assert list(read_run(writer.path).unfinished) == ROWS


def test_final_rows_replace_unfinished_ones_after_any_kill(writer: RunWriter) -> None:
    writer.keep_unfinished(ROWS)
    (writer.path / f".{UNFINISHED}.abc").write_text("half a li")
    (writer.path / store.CELLS).write_text(store.lines_of([cell("EOS", "compile")]))
    writer.close()
    assert [row.mode for row in read_run(writer.path).unfinished] == ["graph"]
    again, run = RunWriter.reopen(writer.path)
    with again:
        assert [row.mode for row in run.unfinished] == ["graph"]
        assert not list(writer.path.glob(f".{UNFINISHED}.*"))
        again.append(cell("EOS", "graph"))
    assert not (writer.path / UNFINISHED).exists()


def test_file_size_limit_leaves_older_unfinished_rows(writer: RunWriter) -> None:
    assert writer.keep_unfinished(ROWS[:1]) is True
    before = (writer.path / UNFINISHED).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        assert writer.keep_unfinished(ROWS) is False
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.close()
    assert (writer.path / UNFINISHED).read_bytes() == before
    assert not list(writer.path.glob(f".{UNFINISHED}.*"))


def test_whoever_reads_while_rows_become_final_finds_them(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.keep_unfinished(ROWS)
    content, read = store._content, []

    def meanwhile(path: Path) -> bytes:
        try:
            return content(path)
        finally:
            if not read and path.name in (store.CELLS, UNFINISHED):
                read.append(path)
                writer.append(*WHOLE)

    monkeypatch.setattr(store, "_content", meanwhile)
    (writer.path / store.CELLS).write_text(store.lines_of([cell("ST")]))
    run = read_run(writer.path)
    assert read and {row.mode for row in (*run.cells, *run.unfinished) if row.workload == "EOS"} == {
        "compile",
        "graph",
    }


def test_further_signals_do_not_change_the_exit_code(fake: Fake) -> None:
    """Of one who holds Ctrl-C down until the prompt is there."""
    running = fake.start("run", "EOS", *CPU, behave={"EOS/compile": "hang@metrics"})
    try:
        deadline = time.monotonic() + 60
        while not any("about to hang" in log.read_text() for log in fake.runs.glob("*/logs/EOS.compile.log")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        while running.poll() is None and time.monotonic() < deadline:
            running.send_signal(signal.SIGINT)
            time.sleep(0.002)
        assert running.returncode == 130, running.communicate()
    finally:
        running.kill()
        running.communicate()


def killed(fake: Fake, number: signal.Signals) -> Path:
    """A run in three processes that gets this signal, twice, while the second ones are prepared."""
    behave = {"EOS/compile": "later:deaf,later:hang"}
    running = fake.start("run", "EOS", "ST", *CPU, "--processes", "3", behave=behave)
    try:
        deadline = time.monotonic() + 60
        while not any("about to hang" in log.read_text() for log in fake.runs.glob("*/logs/EOS.compile.log")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running.send_signal(number)
        time.sleep(0.1)
        running.send_signal(number)
        _, err = running.communicate(timeout=60)
    finally:
        running.kill()
    if number is not signal.SIGKILL:
        assert running.returncode == 130 and "what was measured of eager, compile is kept" in err, err
    return fake.only_run()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_is_reported_and_measured_again(fake: Fake, number: signal.Signals) -> None:
    run = killed(fake, number)
    rows = read_run(run).unfinished
    assert [(row.workload, row.mode, row.processes) for row in rows] == [("EOS", "eager", 1), ("EOS", "compile", 1)]
    reported = fake("report", str(run))
    assert reported.returncode == 0, reported.stderr
    table = next(run.glob("**/shortages.csv")).read_text()
    assert table.count("interrupted") == 2 and "the run ended before the workload was through" in table
    done = fake("run", "--resume", str(run))
    assert done.returncode == 0, done.stderr
    assert "ended before EOS was through; that is measured again from the beginning" in " ".join(done.stderr.split())
    final = read_run(run)
    assert final.unfinished == () and len(final.cells) == 4
    assert all(row.processes == 3 and not row.shortages for row in final.cells)


def made(folder: Path, day: int, *rows: Cell, of: Sequence[Cell] = ()) -> Path:
    """A run of this day with these final rows, and `of` the workload that it ended in."""
    made_at = {"run_id": f"day{day}", "created_at": f"2026-01-{day:02}T00:00:00+00:00"}
    path = write_run(folder / f"day{day}", rows, environment(**made_at))
    if of:
        (path / UNFINISHED).write_text(store.lines_of(of))
    return path


WHOLE = [cell("EOS", mode) for mode in ("compile", "graph")]


@pytest.mark.parametrize(
    ("older", "taken"),
    [
        (WHOLE, "day1"),
        (WHOLE[:1], "day2"),
        ([WHOLE[0], failed_cell("EOS", "graph", Status.CRASH)], "day2"),
        ([], "day2"),
    ],
)
def test_unfinished_rows_replace_older_ones_that_lack_a_mode(tmp_path: Path, older: Sequence[Cell], taken: str) -> None:
    runs = [load_run(made(tmp_path, 1, cell("ST"), *older)), load_run(made(tmp_path, 2, of=ROWS))]
    joined = join_runs(runs)
    parts = {part.environment.run_id for part in joined.parts if any(row.workload == "EOS" for row in part.cells)}
    assert parts == {taken}
    assert any("run day2 ended before EOS was through" in remark for remark in joined.remarks)


def test_older_unfinished_rows_stand_for_nothing_newer(tmp_path: Path) -> None:
    """Not even for rows that were measured beside other programs."""
    others = {"cpu_cores": 9.0, "gpus_at_work": 0, "gpu_processes": 0}
    beside = [Cell.model_validate(row.model_dump() | {"others": others}) for row in WHOLE]
    runs = [load_run(made(tmp_path, 1, of=ROWS)), load_run(made(tmp_path, 2, *beside))]
    assert {row.processes for row in join_runs(runs).cells} == {3}


def test_unfinished_rows_have_ratios_and_no_verdict(tmp_path: Path) -> None:
    planned = environment(settings={"workloads": ["EOS", "ST"], "modes": ["compile", "graph"]})
    path = write_run(tmp_path / "run", [], planned)
    (path / UNFINISHED).write_text(store.lines_of([ROWS[0], unfinished_cell("EOS", "graph", blocks=WHOLE[1].blocks)]))
    run = load_run(path)
    assert run.missing == (("ST", "compile"), ("ST", "graph"))
    (remark,) = run.remarks
    assert "ended before EOS was through" in remark and "nothing is measured" not in remark
    (item,) = [each for each in compare.compare(run) if each.metric is compare.TimeKind.LATENCY and each.ratio]
    assert item.ratio is not None and (item.ratio.processes, item.alternating) == (1, True)
    assert item.verdict in (None, stats.Verdict.AMBG)


def test_a_comparison_of_runs_says_that_one_was_not_through(tmp_path: Path) -> None:
    whole, part = made(tmp_path, 1, *WHOLE), made(tmp_path, 2, of=ROWS)
    found = compare_sides(find_side(str(whole)), find_side(str(part)))
    assert [pair.outcome for pair in found.pairs] == [Outcome.CONTROL] * 2
    assert any("NEW: run day2 ended before EOS was through" in remark for remark in found.remarks)


def test_merge_keeps_unfinished_rows_unless_another_run_has_them(tmp_path: Path) -> None:
    st = [unfinished_cell("ST", "compile")]
    modes = ["compile", "graph"]
    for name, rows, of in (("one", [cell("MMC")], [*ROWS, *st]), ("two", WHOLE, [])):
        plan = RunPlan.model_validate({**FULL.settings.model_dump(), "workloads": [name], "modes": modes})
        path = write_run(tmp_path / name, rows, environment(run_id=name, settings=plan.model_dump()))
        (path / UNFINISHED).write_text(store.lines_of(of))
    first, second = tmp_path / "one", tmp_path / "two"
    assert merge_runs([str(first), str(second)], tmp_path / "whole", []).cells == 3
    merged = read_run(tmp_path / "whole")
    assert {row.workload for row in merged.cells} == {"MMC", "EOS"}
    assert list(merged.unfinished) == st
    assert (tmp_path / "whole" / UNFINISHED).read_text() == store.lines_of(st)


def test_rows_of_one_group_are_of_one_start(writer: RunWriter) -> None:
    """Or they would be compared as if their blocks had alternated."""
    writer._unfinished = ROWS
    row = unfinished_cell("EOS", "graph", processes=5)
    assert writer.keep_unfinished([row]) is True
    writer.close()
    assert list(read_run(writer.path).unfinished) == [row]


def test_the_failures_of_an_unfinished_run_are_in_its_report(tmp_path: Path) -> None:
    lacks = ROWS[0].shortages
    rows = [ROWS[0], failed_cell("EOS", "graph", Status.CRASH).model_copy(update={"shortages": lacks})]
    run = load_run(made(tmp_path, 1, of=rows))
    assert [(row.mode, row.status) for row in run.failed] == [("graph", Status.CRASH)]
    older = load_run(made(tmp_path, 0, *WHOLE))
    joined = join_runs([older, run])
    assert [row.mode for row in joined.failed] == ["graph"], "nothing hides that it fails now"


def test_disk_without_room_for_unfinished_rows_costs_no_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    write, refused = store.write_atomically, []

    def full(path: Path, content: str) -> None:
        if path.name != UNFINISHED:
            return write(path, content)
        refused.append(path)
        raise CannotWrite("the disk is full")

    monkeypatch.setattr("suite.results.run_writer.write_atomically", full)
    monkeypatch.setattr(run_writer, "EVERY_S", 0.0)
    bench.run()
    assert len(refused) > 5 and len(bench.cells()) == 4


def test_read_only_folder_does_not_hide_what_ended_the_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.name == RESERVE:
            raise PermissionError(errno.EROFS, "Read-only file system", str(path))
        unlink(path, missing_ok)

    def read_only(path: Path, content: str) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system", str(path))

    with interrupted_once_it_hangs(bench.path / "logs" / "FAKE.graph.log"), monkeypatch.context() as changed:
        changed.setattr(Path, "unlink", refused)
        changed.setattr("suite.results.run_writer.write_atomically", _after_creation(read_only))
        bench.run({"graph": "hang@metrics"})
    assert (
        "what was measured of eager, compile, graph, graph-unpartitioned could not be written"
        in (bench.folder / "display").read_text()
    )


def test_final_rows_of_a_read_only_folder_go_elsewhere(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    append = run_writer._append_lines

    def read_only(path: Path, lines: bytes) -> None:
        if path.is_relative_to(bench.path):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        append(path, lines)

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    with monkeypatch.context() as changed:
        changed.setattr(run_writer, "_append_lines", read_only)
        with pytest.raises(CannotWrite, match=r"Read-only file system\. What was measured is in .*elsewhere"):
            bench.run()
    (saved,) = (tmp_path / "elsewhere").glob(f"*{run_writer.UNSAVED}")
    saved.rename(bench.path / run_writer.UNSAVED)
    writer, run = RunWriter.reopen(bench.path)
    writer.close()
    assert [row.mode for row in run.cells] == [mode.name for mode in FOUR] and run.unfinished == ()


def _after_creation(refusal: Callable[[Path, str], None]) -> Callable[[Path, str], None]:
    """Writes what makes a run, and refuses the rest."""

    def write(path: Path, content: str) -> None:
        (store.write_atomically if path.name == store.ENVIRONMENT else refusal)(path, content)

    return write
