"""Whole runs with fake workers through the real runner: the order of measurements, and effects of failures."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence

import pytest
from fixtures import fake_worker
from fixtures.bench import FOUR, Bench, bench
from fixtures.fake_runs import SETTINGS, events, fake_workers_alive, fake_workload, living, recorded_pids

import suite.run.group
import suite.run.schedule
from suite.measure.modes import MODES, Mode
from suite.results import store
from suite.results.schema import Correctness, Grouping, Status
from suite.run.group import bitwise_failure, compare_bitwise
from suite.run.runner import plan_jobs

__all__ = ["bench"]


@pytest.fixture(autouse=True)
def memory_to_wait_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little this host has: fake workers need none."""
    monkeypatch.setattr(suite.run.group, "WORKER_BYTES", 0)


def test_good_run_has_a_row_per_mode_with_all_samples(bench: Bench) -> None:
    outcome = bench.run()
    cells = bench.cells()
    assert list(cells) == [mode.name for mode in FOUR]
    assert [cell.mode for cell in outcome.cells] == list(cells)
    for cell in cells.values():
        assert cell.status is Status.PASS
        assert [len(block.host_us) for block in cell.blocks] == [6] * 5
        assert cell.grouping is Grouping.TOGETHER
        assert cell.group == list(cells)
        assert cell.metrics is not None
        assert cell.log_tail is None
        assert 0 < cell.wall_s < 60
    assert outcome.failed == []
    assert "fake worker of FAKE graph" in (bench.path / "logs" / "FAKE.graph.log").read_text()
    assert fake_workers_alive() == []


def test_all_modes_measure_a_block_in_changing_order(bench: Bench) -> None:
    bench.run(modes=FOUR[:3], blocks=30)
    names = {mode.name for mode in FOUR[:3]}
    measured = bench.measured()
    assert [turn for _, _, turn in measured] == list(range(90))
    cycles = [measured[at : at + 3] for at in range(0, 90, 3)]
    assert all({mode for mode, _, _ in cycle} == names for cycle in cycles)
    assert [{block for _, block, _ in cycle} for cycle in cycles] == [{index} for index in range(30)]
    before = [first[0] for first, then in itertools.pairwise(measured) if then[0] == "compile"]
    assert {before.count(name) > 3 for name in names - {"compile"}} == {True}, "compile does not always follow eager"


def test_each_mode_has_the_blocks_of_all_its_processes(bench: Bench) -> None:
    bench.run(modes=FOUR[1:3], processes=3)
    for cell in bench.cells().values():
        assert cell.processes == 3
        assert [(block.process, block.index) for block in cell.blocks] == [(p, i) for p in range(3) for i in range(5)]
        assert cell.other_kernels == []
    log = (bench.path / "logs" / "FAKE.graph.log").read_text()
    assert log.count("fake worker of FAKE graph") == 3


def test_later_processes_start_while_the_first_ones_compile(bench: Bench) -> None:
    bench.run(modes=FOUR[1:3], processes=3)
    told = events(bench.folder)
    started = [words[1:] for words in told if words[0] == "started" and words[2:]]
    assert sorted(started) == [["compile", "later"]] * 2 + [["graph", "later"]] * 2
    said = [words[0] for words in told]
    begun = [index for index, words in enumerate(told) if words[0] == "started" and words[2:] == ["later"]]
    assert max(begun) < said.index("settled"), "nothing starts while one settles"
    assert fake_workers_alive() == []


def test_later_processes_start_late_where_host_memory_is_short(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.run.group, "WORKER_BYTES", 2**60)
    bench.run(modes=FOUR[1:3], processes=3)
    assert ["graph", "later"] not in [words[1:] for words in events(bench.folder) if words[0] == "started"]
    assert [cell.processes for cell in bench.cells().values()] == [3, 3]


def test_nothing_waits_for_modes_that_do_not_fit_together(bench: Bench) -> None:
    bench.run(modes=FOUR[1:3], fits=1, processes=2)
    started = [words[1:] for words in events(bench.folder) if words[0] == "started"]
    cells = bench.cells()
    assert {(cell.status, cell.grouping) for cell in cells.values()} == {(Status.PASS, Grouping.SEQUENTIAL)}
    assert all(cell.group == [mode] and not cell.baseline_blocks for mode, cell in cells.items())
    assert fake_workers_alive() == []
    assert (started.count(["graph", "later"]), started.count(["compile", "later"])) == (1, 1), "for its mode alone"


def test_profilers_run_one_by_one_after_timing(bench: Bench) -> None:
    bench.run(modes=FOUR[:3], processes=2)
    told = [" ".join(words) for words in events(bench.folder) if words[0] in ("once", "profiler", "metrics", "kernels")]
    names = [mode.name for mode in FOUR[:3]]
    assert told[:3] == [f"once {name}" for name in names]
    assert sorted(told[3:6]) == sorted(f"profiler {name}" for name in names)
    assert told[6:9] == [f"metrics {name}" for name in names]
    assert sorted(told[9:]) == sorted(f"kernels {name}" for name in names)


@pytest.mark.parametrize("phase", ["once", "profiler", "metrics"])
def test_failed_metrics_keep_earlier_findings_but_do_not_pass(bench: Bench, phase: str) -> None:
    outcome = bench.run({"graph": f"fail:run_error@{phase}"}, modes=FOUR[1:3])
    row = bench.cells()["graph"]
    assert (row.status, [cell.mode for cell in outcome.failed]) == (Status.RUN_ERROR, ["graph"])
    assert [len(block.host_us) for block in row.blocks] == [6] * 5
    assert row.correctness is not None and row.correctness.passed
    assert row.compile is not None
    assert (row.metrics is not None) is (phase != "once"), "results without a profiler are returned before there is one"


@pytest.mark.parametrize("phase", ["@start", "@compile", "@measure"])
def test_mode_that_failed_in_one_process_skips_the_next(bench: Bench, phase: str) -> None:
    bench.run({"graph": f"later:exit:1{phase}"}, modes=FOUR[1:3], processes=3)
    cells = bench.cells()
    assert (cells["graph"].status, cells["graph"].processes) == (Status.CRASH, 2)
    assert (cells["graph"].error or "").startswith("process 2: ")
    assert (cells["compile"].status, len(cells["compile"].blocks)) == (Status.PASS, 15)
    assert fake_workers_alive() == []


def test_row_reports_differences_of_later_processes(bench: Bench) -> None:
    bench.run({"graph": "retune@metrics"}, modes=FOUR[1:3], processes=3)
    cells = bench.cells()
    retuned = ["triton_poi_fused 32x1x1 128x1x1", "triton_poi_fused 64x1x1 128x1x1"]
    for mode, found in (("compile", []), ("graph", retuned)):
        assert [(one.process, one.retuned) for one in cells[mode].later] == [(1, found), (2, found)]
        assert all(one.compile is not None and one.compile.first_call_s == 0.1 for one in cells[mode].later)
    assert (cells["compile"].other_kernels, cells["graph"].other_kernels) == ([], [1, 2])


def test_reference_leads_the_compilation_and_all_settle_together(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    names = ("eager", "graph", "compile", "graph-unpartitioned", "placement", "indirection", "encore")
    bench.run(modes=[MODES[name] for name in names], processes=2)
    compiled, done = bench.compiled(), bench.prepared()
    others = names[1:2] + names[3:]
    first = {("eager", "WARM"), ("compile", "COLD_ALONE"), *((name, "KERNELS_SIDE_BY_SIDE") for name in others)}
    assert compiled[0] == ("compile", "COLD_ALONE"), "before all others start"
    assert set(compiled[:7]) == first, "eager has nothing to tune"
    assert sorted(compiled[7:]) == sorted((name, "WARM") for name in names)
    assert sorted(done[:7]) == sorted(f"compiled {name}" for name in names)
    assert sorted(done[7:14]) == sorted(f"settled {name}" for name in names), "when all have compiled"
    for name in names:
        threads = re.findall(r"^threads (\d+)", (bench.path / "logs" / f"FAKE.{name}.log").read_text(), re.MULTILINE)
        assert threads == ["8" if name == "compile" else "1", "1"], "only what compiles first has compile workers"


@pytest.mark.parametrize(
    ("behave", "modes", "expected"),
    [
        # Without the reference the first mode leads.
        ({}, ("eager", "indirection", "lean", "encore"), {"eager": "WARM", "indirection": "COLD_ALONE"}),
        ({}, ("eager", "compile"), {"eager": "WARM", "compile": "COLD_ALONE"}),
        (
            {"compile": "exit:1@prepare"},
            ("compile", "graph", "graph-unpartitioned"),
            {"graph": "COLD_ALONE", "graph-unpartitioned": "KERNELS_ALONE"},
        ),
    ],
)
def test_first_mode_leads_where_the_reference_does_not(
    bench: Bench, behave: dict[str, str], modes: tuple[str, ...], expected: dict[str, str]
) -> None:
    bench.run(behave, modes=[MODES[name] for name in modes])
    followers = {name: "KERNELS_SIDE_BY_SIDE" for name in ("lean", "encore") if name in modes}
    assert set(bench.compiled()) == {*(expected | followers).items()}


def test_modes_share_a_cache_and_all_cells_found_features(bench: Bench) -> None:
    bench.run(workloads=[fake_workload("ONE"), fake_workload("TWO")])
    told = {
        log.stem: next(line.split() for line in log.read_text().splitlines() if "told" in line)
        for log in (bench.path / "logs").iterdir()
    }
    assert [words[1:] for words in events(bench.folder) if words[0] == "started"] == [["compile"]], "before all others"
    assert len(told) == 8 and {words[-3] for words in told.values()} == {"True"}
    folders = [{words[-1] for log, words in told.items() if log.startswith(name)} for name in ("ONE", "TWO")]
    assert len(folders[0]) == len(folders[1]) == 1 and folders[0] != folders[1]


def test_cold_compile_times_are_taken_of_each_mode_alone(bench: Bench) -> None:
    bench.run(modes=FOUR[:3], cold_compile_times=True)
    assert bench.compiled()[3:] == [("compile", "COLD_ALONE"), ("graph", "COLD_ALONE")]
    assert {cell.mode for cell in bench.cells().values()} == {"eager", "compile", "graph"}


def test_sampling_continues_until_ratios_are_narrow(bench: Bench) -> None:
    """Blocks of the fake worker are all alike: then the least number is enough, and scattered ones take them all."""
    for name, behave in (("CALM", {}), ("WILD", {"graph": "scatter"})):
        limits = {"blocks": 10, "most_blocks": 25, "measure_s": 60.0}
        bench.run(behave, modes=FOUR[1:3], workloads=[fake_workload(name)], **limits)
    assert [(cell.workload, len(cell.blocks)) for cell in bench.cells().values()] == [
        ("CALM", 10), ("CALM", 10), ("WILD", 25), ("WILD", 25),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("action", "status"),
    [
        ("hang", Status.TIMEOUT),
        ("fail:compile_error", Status.COMPILE_ERROR),
        ("exit:1@measure", Status.CRASH),
        ("hang@measure", Status.TIMEOUT),
        ("exit:1@metrics", Status.CRASH),
        ("fail:run_error@metrics", Status.RUN_ERROR),
    ],
)
def test_failing_mode_becomes_a_row_and_others_continue(bench: Bench, action: str, status: Status) -> None:
    outcome = bench.run({"graph": action}, modes=FOUR[:3], timeout_s=4.0)
    cells = bench.cells()
    assert [cell.status for cell in cells.values()] == [Status.PASS, Status.PASS, status]
    graph = cells["graph"]
    assert graph.error and "fake worker of FAKE graph" in (graph.log_tail or "")
    assert str(store.REPOSITORY) not in graph.model_dump_json(), "no path of this machine"
    assert [len(block.host_us) for block in cells["eager"].blocks] == [6] * 5
    assert [cell.mode for cell in outcome.failed] == ["graph"]
    assert fake_workers_alive() == []


def test_failure_does_not_affect_the_next_workload(bench: Bench) -> None:
    bench.run({"ONE/graph": "child,stray,exit:1"}, [fake_workload("ONE"), fake_workload("TWO")], modes=FOUR[1:3])
    passed = [key for key, cell in bench.cells().items() if cell.status is Status.PASS]
    assert passed == ["ONE/compile", "TWO/compile", "TWO/graph"]
    assert living(recorded_pids(bench.folder)) == []


def test_mode_whose_bits_differ_fails_before_it_is_timed(bench: Bench) -> None:
    graphs = {"triton.cudagraphs": True}
    strict = Mode("strict", "must equal graph", baselines=("compile",), options=graphs, bitwise_with=("graph",))
    bench.run({"strict": "other_digest@compile"}, modes=(MODES["compile"], MODES["graph"], strict))
    cell = bench.cells()["strict"]
    assert cell.status is Status.FAIL_ACCURACY
    assert cell.correctness is not None
    assert (cell.correctness.bitwise_with, cell.correctness.bitwise) == ("graph", False)
    assert cell.blocks == []
    assert bench.cells()["graph"].status is Status.PASS


def test_complete_run_has_no_remaining_work(bench: Bench) -> None:
    first = bench.run()
    assert plan_jobs([(fake_workload(), "published")], FOUR, SETTINGS.size, first.cells) == []
    assert len(plan_jobs([(fake_workload(), "current")], FOUR, SETTINGS.size, first.cells)) == 1


def test_events_are_plain_lines_with_their_time(bench: Bench) -> None:
    bench.run({"TWO/compile": "fail:run_error@measure"}, [fake_workload("ONE"), fake_workload("TWO")], FOUR[:2])
    lines = (bench.folder / "display").read_text().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    said = [line[9:] for line in lines]
    assert said[0] == "ONE (1 of 2, about 20s left): eager, compile"
    assert "TWO (2 of 2, about 10s left): eager, compile" in said
    assert "ONE compile: warm-up" in said and "ONE compile: measured 5 blocks" in said
    assert re.fullmatch(r"TWO compile: run_error in \d+s: told to fail.*", said[-1])


def test_budget_starts_fitting_workloads_and_names_the_rest(bench: Bench) -> None:
    workloads = [fake_workload(name) for name in ("ONE", "TWO", "THREE")]
    now = iter([0.0, 0.0, 50.0, 60.0])  # the start, then the time each workload would begin at
    outcome = bench.run(
        workloads=workloads,
        modes=FOUR[:1],
        budget_s=100.0,
        estimates_s={"ONE": 50.0, "TWO": 60.0, "THREE": 30.0},
        clock=lambda: next(now),
    )
    assert [cell.workload for cell in outcome.cells] == ["ONE", "THREE"]
    assert outcome.not_started == ["TWO"]
    assert outcome.failed == []
    assert "TWO: not started" in (bench.folder / "display").read_text()


def test_cold_caches_are_removed_and_warm_ones_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = bench.folder / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    bench.run(modes=FOUR[:1])
    assert list(temporary.iterdir()) == []
    bench.run(modes=FOUR[1:2], warm_cache=True, workloads=[fake_workload("WARM")])
    assert (bench.folder / "warm").is_dir()
    assert bench.compiled()[-1] == ("compile", "KERNELS_ALONE"), "its kernels may be there"


def correctness(digests: Sequence[str], deterministic: bool = True) -> Correctness:
    fields = fake_worker.correctness(len(digests), "same")
    return Correctness.model_validate({**fields, "digests": list(digests), "deterministic": deterministic})


STRICT = Mode("strict", "must equal graph", baselines=("compile",), bitwise_with=("graph",))
PLACEMENT = MODES["placement"]
SAME, OTHER, ANOTHER = (correctness(digests) for digests in (["a", "b"], ["a", "c"], ["u", "v"]))


@pytest.mark.parametrize(
    ("mode", "known", "expected", "fails"),
    [
        (MODES["graph-unpartitioned"], {"graph": [OTHER]}, ("graph", False), False),  # it promises none
        (MODES["eager"], {"graph": [OTHER]}, (None, None), False),  # it has no graphs
        (STRICT, {"graph": [OTHER]}, ("graph", False), True),
        (STRICT, {}, ("graph", None), False),
        (STRICT, {"graph": [correctness(["a", "c"], deterministic=False)]}, ("graph", None), False),
        (PLACEMENT, {"graph": [SAME], "graph-unpartitioned": [OTHER]}, ("graph", True), False),
        (PLACEMENT, {"graph": [OTHER], "graph-unpartitioned": [SAME]}, ("graph-unpartitioned", True), False),
        (PLACEMENT, {"graph": [OTHER], "graph-unpartitioned": [OTHER]}, ("graph", False), True),
        # If none is equal they must agree among themselves to be a reference at all.
        (PLACEMENT, {"graph": [OTHER], "graph-unpartitioned": [ANOTHER]}, ("graph", None), False),
        # The programs as they are, with the same kernels: they tell nothing about different kernels.
        (PLACEMENT, {"graph-unpartitioned": [OTHER], "compile": [OTHER]}, ("graph-unpartitioned", None), False),
        (PLACEMENT, {"graph-unpartitioned": [SAME], "compile": [SAME]}, ("graph-unpartitioned", True), False),
        (PLACEMENT, {"graph": [SAME, ANOTHER]}, ("graph", True), False),  # of either time that it was prepared
    ],
)
def test_bits_are_compared_with_modes_that_promise_them(
    mode: Mode, known: Mapping[str, Sequence[Correctness]], expected: tuple[str | None, bool | None], fails: bool
) -> None:
    compared = compare_bitwise(mode, SAME, known)
    assert (compared.bitwise_with, compared.bitwise) == expected
    failure = bitwise_failure(mode, compared)
    assert (failure is not None) is fails
    if failure is not None:
        assert f"must equal those of {' or '.join(mode.bitwise_with)} bit for bit" in failure.error
