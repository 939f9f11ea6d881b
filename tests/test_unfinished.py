"""A run that ends in the middle of a workload keeps what was measured, says what it lacks, and measures it again."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from fixtures.bench import FOUR, Bench, bench, interrupted_once_it_hangs
from fixtures.fake_runs import SETTINGS, fake_workers_alive, fake_workload
from fixtures.synthetic_results import cell, environment, failed_cell, unfinished_cell, write_run
from test_cli import CPU, Fake, fake

from models.registry import Sharding
from suite import stats, store, unfinished
from suite.compare.pairs import compare_sides
from suite.compare.sides import find_side
from suite.group import GroupSession
from suite.interrupt import Interrupted
from suite.merge import merge_runs
from suite.progress import LineDisplay
from suite.report import compare
from suite.report.join import join_runs
from suite.report.load import load_run
from suite.run_writer import RESERVE, RunWriter
from suite.schema import Cell, Grouping, Status
from suite.settings import FULL, RunPlan
from suite.store import UNFINISHED, CannotWrite, read_run

__all__ = ["bench", "fake"]

THREE_PROCESSES = SETTINGS.model_copy(update={"processes": 3})


def kept(bench: Bench) -> dict[str, Cell]:
    """Unfinished rows on disk by mode."""
    return {row.mode: row for row in read_run(bench.path).unfinished}


def blocks_of(row: Cell) -> dict[int, int]:
    """How many blocks each process has."""
    processes = [block.process for block in row.blocks]
    return {process: processes.count(process) for process in processes}


def lacks(row: Cell) -> list[tuple[str, int, str]]:
    assert row.status is Status.PASS and row.is_unfinished
    return [(one.mode, one.process, one.phase) for one in row.shortages]


def interrupted(bench: Bench, mode: str, told: str, **options: object) -> None:
    """A run whose worker of this mode hangs where it is told to, and which is interrupted then."""
    with interrupted_once_it_hangs(bench.path / "logs" / f"FAKE.{mode}.log"):
        bench.run({mode: told}, **options)  # type: ignore[arg-type]
    assert fake_workers_alive() == []
    assert read_run(bench.path).cells == (), "no row is final"


def goes_on(bench: Bench, **options: object) -> None:
    """The run is gone on with, and has nothing unfinished then."""
    before = len(bench.measured())
    bench.run(**options)  # type: ignore[arg-type]
    rows = bench.cells().values()
    assert len(rows) == 4 and all(row.status is Status.PASS and not row.shortages for row in rows)
    blocks = sum(len(row.blocks) + sum(map(len, row.baseline_blocks.values())) for row in rows)
    assert len(bench.measured()) - before == blocks, "all is measured again"
    assert read_run(bench.path).unfinished == () and not (bench.path / UNFINISHED).exists()


@pytest.mark.parametrize("phase", ["start", "prepare", "compile", "settle"])
def test_an_interrupt_while_later_processes_are_made_keeps_what_the_first_ones_measured(
    bench: Bench, phase: str
) -> None:
    interrupted(bench, "graph", f"later:hang@{phase}", settings=THREE_PROCESSES)
    rows = kept(bench)
    if phase == "start":  # while the first processes compile
        assert rows == {}
    else:
        assert list(rows) == [mode.name for mode in FOUR]
        for name, row in rows.items():
            assert (blocks_of(row), row.processes, lacks(row)) == ({0: 5}, 1, [(name, 1, "prepare")])
            assert row.metrics is not None and row.metrics.kernels, "metrics had been taken"
        assert "FAKE: not through; what was measured of eager" in (bench.folder / "display").read_text()
    goes_on(bench, settings=THREE_PROCESSES)


def test_an_interrupt_between_blocks_keeps_those_of_all_processes(bench: Bench) -> None:
    interrupted(bench, "graph", "later:block:3:hang@measure", settings=THREE_PROCESSES)
    for name, row in kept(bench).items():
        assert blocks_of(row)[0] == 5 and blocks_of(row)[1] in ((3,) if name == "graph" else (3, 4))
        assert (row.processes, lacks(row)) == (2, [(name, 1, "measure")])
    assert len(kept(bench)) == 4
    goes_on(bench, settings=THREE_PROCESSES)


@pytest.mark.parametrize(("phase", "has_kernels"), [("once", []), ("profiler", []), ("metrics", ["eager", "compile"])])
def test_an_interrupt_while_metrics_are_taken_keeps_all_blocks_and_the_metrics_of_others(
    bench: Bench, phase: str, has_kernels: Sequence[str]
) -> None:
    interrupted(bench, "graph", f"hang@{phase}", settings=THREE_PROCESSES)
    rows = kept(bench)
    assert list(rows) == [mode.name for mode in FOUR]
    for name, row in rows.items():
        whole = name in has_kernels
        assert blocks_of(row) == {0: 5}
        assert lacks(row) == [*([] if whole else [(name, 0, "metrics")]), (name, 1, "prepare")]
        assert bool(row.metrics and row.metrics.kernels) is whole
    goes_on(bench, settings=THREE_PROCESSES)


def test_modes_without_a_block_and_those_that_failed_have_no_unfinished_row(bench: Bench) -> None:
    behave = {"eager": "block:1:exit:1@measure", "compile": "fail:fail_accuracy", "graph": "block:3:hang@measure"}
    with interrupted_once_it_hangs(bench.path / "logs" / "FAKE.graph.log"):
        bench.run(behave)
    assert set(kept(bench)) == {"graph", "graph-unpartitioned"}


def test_a_workload_interrupted_before_anything_was_measured_leaves_nothing(bench: Bench) -> None:
    interrupted(bench, "graph", "hang@compile")
    assert not (bench.path / UNFINISHED).exists()
    assert "not through" not in (bench.folder / "display").read_text()


def test_an_interrupt_in_the_second_half_keeps_the_rows_of_the_first(bench: Bench) -> None:
    interrupted(bench, "graph-unpartitioned", "hang@metrics", fits=3)
    rows = kept(bench)
    assert set(rows) == {mode.name for mode in FOUR}
    for name, row in rows.items():
        assert (row.grouping, blocks_of(row)) == (Grouping.HALVES, {0: 5})
        last = name == "graph-unpartitioned"
        own = [(name, 0, "metrics"), (name, 1, "prepare")] if last else [(name, 1, "prepare")]
        beside = [(mode, 0, "metrics") for mode in ("compile", "graph")] if last else []
        assert lacks(row) == own + beside, "of its baselines nobody looked at the kernels there"
    assert [len(blocks) for blocks in rows["graph-unpartitioned"].baseline_blocks.values()] == [5, 5]
    goes_on(bench, fits=3)


def test_ranks_of_an_interrupted_cell_have_their_parts(bench: Bench) -> None:
    split = fake_workload("FAKE@tp2", tp=2, sharding=Sharding(lambda module, mesh: None, 1, lambda *_: None))
    with interrupted_once_it_hangs(bench.path / "logs" / "FAKE@tp2.graph.rank1.log"):
        bench.run({"graph#1": "block:2:hang@measure"}, workloads=[split], modes=FOUR[1:3])
    assert len(kept(bench)) == 2
    for row in kept(bench).values():
        assert row.tp == 2 and len(row.ranks) == 2
        assert all(len(part.blocks) >= len(row.blocks) >= 2 for part in row.ranks)


def test_a_start_that_ends_earlier_leaves_the_rows_of_the_one_before(bench: Bench) -> None:
    interrupted(bench, "graph", "later:block:3:hang@measure", settings=THREE_PROCESSES)
    before = (bench.path / UNFINISHED).read_bytes()
    (bench.path / "logs" / "FAKE.graph.log").unlink()
    interrupted(bench, "graph", "hang@metrics", settings=THREE_PROCESSES)
    assert (bench.path / UNFINISHED).read_bytes() == before
    (bench.path / "logs" / "FAKE.graph.log").unlink()
    interrupted(bench, "graph", "later:hang@metrics", settings=THREE_PROCESSES)
    rows = kept(bench)
    assert all(blocks_of(row) == {0: 5, 1: 5} for row in rows.values()), "that one got farther"


def test_another_workload_does_not_touch_unfinished_rows(bench: Bench) -> None:
    interrupted(bench, "graph", "later:hang", settings=THREE_PROCESSES)
    before = kept(bench)
    bench.run(workloads=[fake_workload("OTHER")])
    assert kept(bench) == before
    assert {row.workload for row in read_run(bench.path).cells} == {"OTHER"}
    with interrupted_once_it_hangs(bench.path / "logs" / "THIRD.graph.log"):
        bench.run({"graph": "hang@metrics"}, workloads=[fake_workload("THIRD")])
    assert {row.workload for row in read_run(bench.path).unfinished} == {"FAKE", "THIRD"}


def test_an_error_of_the_suite_itself_keeps_them_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(GroupSession, "side_by_side", broken)
    with pytest.raises(ZeroDivisionError):
        bench.run(settings=THREE_PROCESSES)
    assert {name: blocks_of(row) for name, row in kept(bench).items()} == {mode.name: {0: 5} for mode in FOUR}


def test_while_blocks_are_measured_they_are_written_now_and_then(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[int, int]] = []
    keep = RunWriter.keep_unfinished

    def noted(writer: RunWriter, rows: Sequence[Cell], *, last: bool = False) -> bool:
        keep(writer, rows, last=last)
        seen.append(blocks_of(kept(bench)["graph"]))
        return True

    monkeypatch.setattr(RunWriter, "keep_unfinished", noted)
    monkeypatch.setattr(unfinished, "EVERY_S", 0.0)
    bench.run()
    assert seen[:5] == [{0: count} for count in range(1, 6)]
    seen.clear()
    monkeypatch.setattr(unfinished, "EVERY_S", 1000.0)
    bench.run(workloads=[fake_workload("OTHER")])
    assert seen == [{0: 5}, {0: 5}], "behind blocks and behind metrics"


def test_rows_of_a_workload_become_final_together(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(display: LineDisplay, row: Cell) -> None:
        raise Interrupted("SIGTERM")

    monkeypatch.setattr(LineDisplay, "cell_ends", stopped)
    with pytest.raises(Interrupted):
        bench.run()
    assert list(bench.cells()) == [mode.name for mode in FOUR]
    assert kept(bench) == {}


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

    monkeypatch.setattr("suite.run_writer.write_atomically", full)
    assert writer.keep_unfinished(ROWS) is False
    assert reserve.exists() and not (writer.path / UNFINISHED).exists()
    assert writer.keep_unfinished(ROWS, last=True) is True
    writer.close()
    assert list(read_run(writer.path).unfinished) == ROWS


def test_final_rows_stand_for_unfinished_ones_wherever_it_was_killed(writer: RunWriter) -> None:
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
def test_unfinished_rows_take_the_place_of_older_ones_only_where_these_lack_a_mode(
    tmp_path: Path, older: Sequence[Cell], taken: str
) -> None:
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


def test_unfinished_rows_have_ratios_and_no_verdict_and_are_not_missing(tmp_path: Path) -> None:
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
    assert len(found.pairs) == 2 and all(pair.ratio for pair in found.pairs)
    assert all(pair.verdict is not stats.Verdict.SAME for pair in found.pairs)
    assert any("NEW: run day2 ended before EOS was through" in remark for remark in found.remarks)


def test_a_merge_keeps_unfinished_rows_unless_another_run_has_the_cell(tmp_path: Path) -> None:
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
