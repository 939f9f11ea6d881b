"""Memory that runs short behind samples: these stand, nothing is measured twice, and rows say what is missing."""

from __future__ import annotations

import pytest
from fixtures.bench import FOUR, Bench, bench
from fixtures.fake_runs import events, fake_workers_alive, fake_workload

from models.registry import Sharding
from suite.measure.modes import MODES, select_modes
from suite.results.schema import Cell, Grouping, Status

__all__ = ["bench"]

NAMES = [mode.name for mode in FOUR[:3]]


def blocks_of(cell: Cell) -> dict[int, list[int]]:
    """Indices of the blocks of each process."""
    found: dict[int, list[int]] = {}
    for block in cell.blocks:
        found.setdefault(block.process, []).append(block.index)
    return found


def short_in(cell: Cell) -> list[tuple[str, int, str]]:
    assert all("told to fail" in one.error for one in cell.shortages)
    return [(one.mode, one.process, one.phase) for one in cell.shortages]


def nothing_was_measured_twice(bench: Bench) -> bool:
    """Every block that a worker was asked for and answered is in a row."""
    asked = len(bench.measured())
    return asked == sum(len(cell.blocks) for cell in bench.cells().values())


@pytest.mark.parametrize("phase", ["once", "profiler", "metrics"])
def test_memory_short_for_metrics_leaves_all_samples(bench: Bench, phase: str) -> None:
    outcome = bench.run({"graph": f"once:fail:oom@{phase}"}, modes=FOUR[:3], processes=3)
    cells = bench.cells()
    assert outcome.failed == []
    for name, cell in cells.items():
        assert (cell.status, cell.error, cell.grouping, cell.group) == (Status.PASS, None, Grouping.TOGETHER, NAMES)
        assert (cell.processes, blocks_of(cell)) == (3, {process: list(range(5)) for process in range(3)})
        assert short_in(cell) == ([("graph", 0, "metrics")] if name == "graph" else [])
    assert nothing_was_measured_twice(bench)
    assert (cells["graph"].metrics is None) is (phase == "once"), "what was told before the profiler is kept"
    assert cells["graph"].metrics is None or cells["graph"].metrics.kernels is None
    for name in NAMES[:2]:
        found = cells[name].metrics
        assert found is not None and found.kernels, "those of others are measured"
    said = (bench.folder / "display").read_text()
    assert "FAKE graph: pass in" in said and "; process 1 lacked memory in phase 'metrics': told to fail" in said


@pytest.mark.parametrize(("phase", "then"), [("once", "once graph"), ("metrics", "metrics graph")])
def test_memory_is_given_back_before_another_process_goes_on(bench: Bench, phase: str, then: str) -> None:
    bench.run({"compile": f"linger@{phase}"}, modes=FOUR[:3])
    said = [" ".join(words) for words in events(bench.folder)]
    assert said.index("gone compile") < said.index(then)


def test_single_mode_short_of_memory_for_metrics_has_passed(bench: Bench) -> None:
    bench.run({"graph": "fail:oom@metrics"}, modes=FOUR[2:3])
    cell = bench.cells()["graph"]
    assert (cell.status, cell.grouping, short_in(cell)) == (Status.PASS, Grouping.TOGETHER, [("graph", 0, "metrics")])


def test_all_modes_may_lack_the_memory_for_their_metrics(bench: Bench) -> None:
    bench.run({"*": "fail:oom@once"}, modes=FOUR[:3])
    cells = bench.cells()
    assert {(cell.status, cell.grouping, len(cell.blocks)) for cell in cells.values()} == {
        (Status.PASS, Grouping.TOGETHER, 5)
    }
    assert nothing_was_measured_twice(bench)


def test_mode_short_of_memory_still_asks_for_more_processes(bench: Bench) -> None:
    modes = (MODES["graph"], MODES["graph-unpartitioned"])
    bench.run({"graph": "differ,once:fail:oom@metrics"}, modes=modes, processes=3, most_processes=5)
    assert {mode: (cell.processes, len(cell.blocks)) for mode, cell in bench.cells().items()} == {
        "graph": (5, 25), "graph-unpartitioned": (5, 25),
    }  # fmt: skip
    assert nothing_was_measured_twice(bench)


def test_later_processes_short_for_metrics_have_their_samples(bench: Bench) -> None:
    bench.run({"graph": "later:fail:oom@metrics"}, modes=FOUR[:3], processes=3)
    cells = bench.cells()
    assert {(cell.status, cell.processes, len(cell.blocks)) for cell in cells.values()} == {(Status.PASS, 3, 15)}
    assert short_in(cells["graph"]) == [("graph", 1, "metrics"), ("graph", 2, "metrics")]
    assert cells["graph"].metrics is not None and cells["graph"].metrics.kernels
    assert nothing_was_measured_twice(bench)


def test_mode_out_of_memory_while_timed_keeps_its_blocks(bench: Bench) -> None:
    bench.run({"graph": "block:2:fail:oom@measure"}, modes=FOUR[:3], processes=3)
    cells = bench.cells()
    assert {(cell.status, cell.grouping) for cell in cells.values()} == {(Status.PASS, Grouping.TOGETHER)}
    assert (cells["graph"].processes, blocks_of(cells["graph"])) == (1, {0: [0, 1]})
    assert (short_in(cells["graph"]), cells["graph"].metrics) == ([("graph", 0, "measure")], None)
    for name in NAMES[:2]:
        assert blocks_of(cells[name]) == {process: list(range(5)) for process in range(3)}
        assert cells[name].metrics is not None
    asked = [(mode, index) for mode, index, _ in bench.measured() if mode == "graph"]
    assert asked == [("graph", 0), ("graph", 1)], "and not in a later process"
    assert fake_workers_alive() == []


def test_mode_without_a_block_moves_to_a_smaller_group(bench: Bench) -> None:
    bench.run({"graph": "once:fail:oom@measure"}, modes=FOUR[:3])
    cells = bench.cells()
    assert {cell.status for cell in cells.values()} == {Status.PASS}
    assert {mode: cell.grouping for mode, cell in cells.items()} == {
        "eager": Grouping.TOGETHER, "compile": Grouping.TOGETHER, "graph": Grouping.PAIRS,
    }  # fmt: skip
    assert [len(cell.blocks) for cell in cells.values()] == [5, 5, 5]
    assert [block.index for block in cells["graph"].baseline_blocks["compile"]] == list(range(5))
    assert all(not cell.shortages for cell in cells.values())
    assert len(bench.measured()) == 10 + 10, "the baseline once more, beside it"


def test_where_no_mode_has_a_block_all_start_again_in_halves(bench: Bench) -> None:
    bench.run({"*": "once:fail:oom@measure"})
    cells = bench.cells()
    assert {(cell.status, cell.grouping) for cell in cells.values()} == {(Status.PASS, Grouping.HALVES)}


@pytest.mark.parametrize("phase", ["prepare", "compile", "settle"])
def test_later_process_that_does_not_fit_is_one_fewer(bench: Bench, phase: str) -> None:
    bench.run({"graph": f"later:fail:oom@{phase}"}, modes=FOUR[:3], processes=3)
    cells = bench.cells()
    assert {(cell.status, cell.grouping) for cell in cells.values()} == {(Status.PASS, Grouping.TOGETHER)}
    assert {mode: (cell.processes, len(cell.blocks)) for mode, cell in cells.items()} == {
        "eager": (3, 15), "compile": (3, 15), "graph": (1, 5),
    }  # fmt: skip
    assert (short_in(cells["graph"]), cells["graph"].later) == ([("graph", 1, "prepare")], [])
    assert cells["graph"].metrics is not None
    assert nothing_was_measured_twice(bench)


def test_later_process_out_of_memory_while_timed_keeps_blocks(bench: Bench) -> None:
    bench.run({"graph": "later:block:2:fail:oom@measure"}, modes=FOUR[:3], processes=3)
    cells = bench.cells()
    assert (cells["graph"].status, cells["graph"].processes) == (Status.PASS, 2)
    assert blocks_of(cells["graph"]) == {0: list(range(5)), 1: [0, 1]}
    assert short_in(cells["graph"]) == [("graph", 1, "measure")]
    assert {len(cells[name].blocks) for name in NAMES[:2]} == {15}


def test_later_process_out_of_memory_before_blocks_is_one_fewer(bench: Bench) -> None:
    bench.run({"graph": "later:fail:oom@measure"}, modes=FOUR[:3], processes=3)
    cell = bench.cells()["graph"]
    assert (cell.status, cell.processes, blocks_of(cell), cell.later) == (Status.PASS, 1, {0: list(range(5))}, [])
    assert short_in(cell) == [("graph", 1, "prepare")], "no sample is of kernels that nobody has seen"


def test_finished_baseline_is_not_measured_alone(bench: Bench) -> None:
    bench.run({"graph": "fail:oom@measure"}, modes=FOUR[:3], processes=3)
    cells = bench.cells()
    assert (cells["graph"].status, cells["graph"].grouping) == (Status.OOM, Grouping.SEQUENTIAL)
    asked = [mode for mode, _, _ in bench.measured()]
    assert (asked.count("eager"), asked.count("compile")) == (15, 15 + 5)


def test_later_processes_that_do_not_fit_together_take_turns(bench: Bench) -> None:
    modes = (MODES["graph"], MODES["graph-unpartitioned"])
    bench.run(modes=modes, processes=3, gpu_bytes=2**50, fits=3)
    for cell in bench.cells().values():
        assert (cell.status, cell.grouping, cell.processes, len(cell.blocks)) == (
            Status.PASS, Grouping.TOGETHER, 3, 15,
        )  # fmt: skip
        assert cell.shortages == []
    assert nothing_was_measured_twice(bench)
    assert fake_workers_alive() == []


def test_failure_after_a_lack_of_memory_ends_the_row(bench: Bench) -> None:
    bench.run({"graph": "fail:oom@once,later:exit:1"}, modes=FOUR[1:3], processes=3)
    cell = bench.cells()["graph"]
    assert (cell.status, len(cell.blocks), short_in(cell)) == (Status.CRASH, 5, [("graph", 0, "metrics")])
    assert (cell.error or "").startswith("process 2: ")


def test_rows_tell_what_their_repeated_baselines_lacked(bench: Bench) -> None:
    modes = select_modes(["eager", "compile", "graph", "graph-unpartitioned", "placement", "indirection"])
    bench.run({"graph": "fail:oom@metrics"}, modes=modes, fits=4)
    cells = bench.cells()
    assert {(cell.status, cell.grouping) for cell in cells.values()} == {(Status.PASS, Grouping.HALVES)}
    for mode in ("graph", "placement", "indirection"):
        assert short_in(cells[mode]) == [("graph", 0, "metrics")]
    assert len(cells["placement"].baseline_blocks["graph"]) == 5


@pytest.mark.parametrize(
    ("told", "short", "count"),
    [
        ("fail:oom@metrics", ("compile", 0, "metrics"), 10),
        ("later:fail:oom", ("compile", 1, "prepare"), 5),
        ("block:2:fail:oom@measure", ("compile", 0, "measure"), 2),
    ],
)
def test_rank_short_of_memory_leaves_what_all_ranks_measured(
    bench: Bench, told: str, short: tuple[str, int, str], count: int
) -> None:
    split = fake_workload("FAKE@tp2", tp=2, sharding=Sharding(lambda module, mesh: None, 1, lambda *_: None))
    bench.run({"compile#1": told}, workloads=(split,), modes=FOUR[1:3], processes=2)
    cells = bench.cells()
    assert {(cell.status, cell.grouping) for cell in cells.values()} == {(Status.PASS, Grouping.TOGETHER)}
    assert (len(cells["compile"].blocks), len(cells["graph"].blocks)) == (count, 10)
    assert short in short_in(cells["compile"])
    assert "rank 1: told to fail" in cells["compile"].shortages[0].error
