"""A run that ends in the middle of a workload keeps what was measured, says what it lacks, and measures it again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fixtures.bench import FOUR, Bench, bench, interrupted_once_it_hangs
from fixtures.fake_runs import fake_workers_alive, fake_workload

import suite.run.group
from models.registry import Sharding
from suite.measure.modes import Mode
from suite.report import compare
from suite.report.runs import load_run
from suite.results import run_writer
from suite.results.run_writer import RunWriter
from suite.results.schema import Cell, CompileTimes, Grouping, Status
from suite.results.store import UNFINISHED, read_run
from suite.run.group import GroupSession
from suite.run.progress import LineDisplay
from suite.run.ranked_worker import RankedWorker, end
from suite.run.supervise import Interrupted
from suite.worker.compile_cache import CompileCache
from tests.suite.cli.test_cli import fake

__all__ = ["bench", "fake"]


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
def test_interrupt_before_later_processes_keeps_first_samples(bench: Bench, phase: str) -> None:
    interrupted(bench, "graph", f"later:hang@{phase}", processes=3)
    rows = kept(bench)
    if phase == "start":  # while the first processes compile
        assert rows == {}
    else:
        assert list(rows) == [mode.name for mode in FOUR]
        for name, row in rows.items():
            assert (blocks_of(row), row.processes, lacks(row)) == ({0: 5}, 1, [(name, 1, "prepare")])
            assert row.metrics is not None and row.metrics.kernels, "metrics had been taken"
        assert "FAKE: not through; what was measured of eager" in (bench.folder / "display").read_text()
    goes_on(bench, processes=3)


def test_interrupt_between_blocks_keeps_those_of_all_processes(bench: Bench) -> None:
    interrupted(bench, "graph", "later:block:3:hang@measure", processes=3)
    for name, row in kept(bench).items():
        assert blocks_of(row)[0] == 5 and blocks_of(row)[1] in ((3,) if name == "graph" else (3, 4))
        assert (row.processes, lacks(row)) == (2, [(name, 1, "measure")])
        assert row.others is not None
    assert len(kept(bench)) == 4
    goes_on(bench, processes=3)


@pytest.mark.parametrize(("phase", "has_kernels"), [("once", []), ("profiler", []), ("metrics", ["eager", "compile"])])
def test_interrupt_during_metrics_keeps_blocks_and_other_metrics(
    bench: Bench, phase: str, has_kernels: Sequence[str]
) -> None:
    interrupted(bench, "graph", f"hang@{phase}", processes=3)
    rows = kept(bench)
    assert list(rows) == [mode.name for mode in FOUR]
    for name, row in rows.items():
        whole = name in has_kernels
        assert blocks_of(row) == {0: 5}
        assert lacks(row) == [*([] if whole else [(name, 0, "metrics")]), (name, 1, "prepare")]
        assert bool(row.metrics and row.metrics.kernels) is whole
    goes_on(bench, processes=3)


def test_failed_modes_say_why_and_need_a_block_for_a_row(bench: Bench) -> None:
    behave = {"eager": "block:1:exit:1@measure", "compile": "fail:fail_accuracy", "graph": "block:3:hang@measure"}
    with interrupted_once_it_hangs(bench.path / "logs" / "FAKE.graph.log"):
        bench.run(behave)
    rows = kept(bench)
    assert {name: row.status for name, row in rows.items()} == {
        "eager": Status.CRASH,
        "compile": Status.FAIL_ACCURACY,
        "graph": Status.PASS,
        "graph-unpartitioned": Status.PASS,
    }
    assert all(row.is_unfinished for row in rows.values())
    assert rows["compile"].error and rows["eager"].log_tail
    shown = (bench.folder / "display").read_text()
    assert "what was measured of graph, graph-unpartitioned is kept" in shown
    assert f"FAKE compile: fail_accuracy: {rows['compile'].first_error_line}" in shown
    goes_on(bench)


def test_later_failure_does_not_replace_samples(bench: Bench) -> None:
    interrupted(bench, "graph", "later:hang", processes=3)
    before = kept(bench)
    (bench.path / "logs" / "FAKE.graph.log").unlink()
    with interrupted_once_it_hangs(bench.path / "logs" / "FAKE.graph.log"):
        bench.run({"compile": "fail:fail_accuracy", "graph": "hang@metrics"}, processes=3)
    assert kept(bench) == before


def test_interrupt_while_last_processes_end_leaves_final_rows(bench: Bench) -> None:
    behave = {"compile": "block:2:exit:1@measure", "graph-unpartitioned": "hang@stop"}
    with interrupted_once_it_hangs(bench.path / "logs" / "FAKE.graph-unpartitioned.log"):
        bench.run(behave)
    assert fake_workers_alive() == []
    rows = bench.cells()
    assert list(rows) == [mode.name for mode in FOUR]
    assert not any(row.is_unfinished for row in rows.values())
    assert rows["compile"].status is Status.CRASH
    assert all(row.metrics and row.metrics.kernels for name, row in rows.items() if name != "compile")
    assert not (bench.path / UNFINISHED).exists()
    assert "FAKE: all of its modes were measured; its rows are final" in (bench.folder / "display").read_text()


def test_interrupt_at_the_end_of_the_last_half_leaves_final_rows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def stopped(workers: Sequence[RankedWorker], *, ask_first: bool) -> None:
        ended.extend([len(workers)] if workers and ask_first else [])
        if len(ended) == 3:  # behind those that did not fit, and one half
            raise Interrupted("SIGTERM")
        end(workers, ask_first=ask_first)

    monkeypatch.setattr(suite.run.group, "end", stopped)
    with pytest.raises(Interrupted):
        bench.run(fits=3)
    assert fake_workers_alive() == [] and kept(bench) == {}
    assert {name: row.grouping for name, row in bench.cells().items()} == {mode.name: Grouping.HALVES for mode in FOUR}


def test_interrupt_with_processes_still_to_come_is_not_final(bench: Bench) -> None:
    interrupted(bench, "graph", "hang@stop", processes=3)
    assert len(kept(bench)) == 4
    goes_on(bench, processes=3)


def test_interrupt_during_cold_compiles_leaves_final_rows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(session: GroupSession, mode: Mode, cache: CompileCache) -> CompileTimes:
        if mode.name == "graph":
            raise Interrupted("SIGTERM")
        return CompileTimes(first_call_s=1234.5, warm_up_s=0.0, warm_cache=False, parts={})

    monkeypatch.setattr(GroupSession, "cold_compile_times", stopped)
    with pytest.raises(Interrupted):
        bench.run(cold_compile_times=True)
    rows = bench.cells()
    assert list(rows) == [mode.name for mode in FOUR] and kept(bench) == {}
    assert {name for name, row in rows.items() if row.compile and row.compile.first_call_s == 1234.5} == {"compile"}
    assert "but for compile times with an empty cache" in (bench.folder / "display").read_text()


def test_a_start_with_fewer_modes_leaves_the_rows_of_the_others(bench: Bench) -> None:
    interrupted(bench, "graph", "later:hang", processes=3)
    before = kept(bench)
    (bench.path / "logs" / "FAKE.graph.log").unlink()
    interrupted(bench, "graph", "later:hang@metrics", processes=3, modes=FOUR[1:3])
    rows = kept(bench)
    assert rows.keys() == before.keys()
    assert {name: blocks_of(row) for name, row in rows.items() if row != before[name]} == {
        "compile": {0: 5, 1: 5},
        "graph": {0: 5, 1: 5},
    }
    ratios = {
        (each.cell.mode, each.baseline): each.alternating
        for each in compare.compare(load_run(bench.path))
        if each.ratio and each.metric is compare.TimeKind.LATENCY
    }
    assert ratios["graph", "compile"] and not ratios["graph-unpartitioned", "compile"]


def test_interrupt_before_any_measurement_leaves_nothing(bench: Bench) -> None:
    interrupted(bench, "graph", "hang@compile")
    assert not (bench.path / UNFINISHED).exists()
    assert "not through" not in (bench.folder / "display").read_text()


def test_interrupt_in_the_second_half_keeps_the_first(bench: Bench) -> None:
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


def test_shorter_start_leaves_the_rows_of_the_one_before(bench: Bench) -> None:
    interrupted(bench, "graph", "later:block:3:hang@measure", processes=3)
    before = (bench.path / UNFINISHED).read_bytes()
    (bench.path / "logs" / "FAKE.graph.log").unlink()
    interrupted(bench, "graph", "hang@metrics", processes=3)
    assert (bench.path / UNFINISHED).read_bytes() == before
    (bench.path / "logs" / "FAKE.graph.log").unlink()
    interrupted(bench, "graph", "later:hang@metrics", processes=3)
    rows = kept(bench)
    assert all(blocks_of(row) == {0: 5, 1: 5} for row in rows.values()), "that one got farther"


def test_another_workload_does_not_touch_unfinished_rows(bench: Bench) -> None:
    interrupted(bench, "graph", "later:hang", processes=3)
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
        bench.run(processes=3)
    assert {name: blocks_of(row) for name, row in kept(bench).items()} == {mode.name: {0: 5} for mode in FOUR}


def test_while_blocks_are_measured_they_are_written_now_and_then(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[int, int]] = []
    keep = RunWriter.keep_unfinished

    def noted(writer: RunWriter, rows: Sequence[Cell], *, last: bool = False) -> bool:
        keep(writer, rows, last=last)
        seen.append(blocks_of(kept(bench)["graph"]))
        return True

    monkeypatch.setattr(RunWriter, "keep_unfinished", noted)
    monkeypatch.setattr(run_writer, "EVERY_S", 0.0)
    bench.run()
    assert seen[:5] == [{0: count} for count in range(1, 6)]
    seen.clear()
    monkeypatch.setattr(run_writer, "EVERY_S", 1000.0)
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


def test_process_cut_off_between_blocks_tells_what_others_did(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """That an interrupt finds, and what is written before SIGKILL."""
    seen: list[bool] = []
    keep = RunWriter.keep_unfinished

    def noted(writer: RunWriter, rows: Sequence[Cell], *, last: bool = False) -> bool:
        seen.append(all(row.others is not None for row in rows))
        return keep(writer, rows, last=last)

    monkeypatch.setattr(RunWriter, "keep_unfinished", noted)
    monkeypatch.setattr(run_writer, "EVERY_S", 0.0)
    interrupted(bench, "graph", "block:3:hang@measure")
    assert len(seen) >= 4 and all(seen)
    assert all(row.others is not None for row in kept(bench).values())


def test_kernels_of_equal_processes_are_compared_for_free(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are made between blocks, and finding a difference takes a millisecond for each process."""

    def compared(*arguments: object) -> None:
        raise AssertionError("they are equal")

    monkeypatch.setattr("suite.run.member.difference", compared)
    bench.run(processes=3)
    assert all(row.processes == 3 and not row.other_kernels for row in bench.cells().values())
