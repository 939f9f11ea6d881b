"""Cells of several ranks: one answer out of all, one end for all, whatever a rank does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from fixtures.bench import Bench
from fixtures.fake_runs import default_signals, fake_worker, fake_workers_alive, fake_workload, living

from models.registry import Sharding, UnknownWorkload, find
from suite.explain.targets import find_targets
from suite.measure.compare import largest_spread
from suite.measure.modes import MODES
from suite.results.errors import WrongUse
from suite.results.schema import Status
from suite.results.store import read_run
from suite.run import process
from suite.run.matrix import parse_degrees, require_whole, split_names
from suite.run.ranked_worker import Answered, RankedWorker, converse_ranked, end, worst
from suite.worker.protocol import (
    Built,
    Collected,
    CollectMetrics,
    Command,
    Compiled,
    Failed,
    Measured,
    Prepared,
    Settle,
)
from tests.suite.run.test_process import COMPILE, MEASURE, prepare

COMPILE_MODE = (MODES["compile"],)
SPLIT = fake_workload("FAKE@tp2", tp=2, sharding=Sharding(lambda module, mesh: None, 1, lambda *_: None))


@contextmanager
def cell(folder: Path, ranks: int = 2, **behave: str) -> Iterator[RankedWorker]:
    told = {name.replace("_", "#"): actions for name, actions in behave.items()}
    one = RankedWorker(fake_worker(told, folder), folder / "cell.log", ranks, "cpu")
    try:
        yield one
    finally:
        end([one], ask_first=False)
        assert one.rendezvous is None or not Path(one.rendezvous).parent.exists()
        assert fake_workers_alive() == []


def ask(one: RankedWorker, command: Command, timeout_s: float = 20.0) -> Answered:
    commands: list[Command] = [
        prepare().model_copy(update={"spec": prepare().spec.model_copy(update={"rank": rank, "tp": len(one.ranks)})})
        if command.do == "prepare"
        else command
        for rank in range(len(one.ranks))
    ]
    return converse_ranked({one: commands}, timeout_s)[one]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "COMPANION_GRACE_S", 0.5)


def test_the_answers_of_all_ranks_become_one(tmp_path: Path) -> None:
    with cell(tmp_path) as one:
        assert isinstance(ask(one, prepare()).whole, Built)
        assert isinstance(ask(one, COMPILE).whole, Compiled)
        assert isinstance(ask(one, Settle()).whole, Prepared)
        measured = ask(one, MEASURE)
        assert isinstance(measured.whole, Measured)
        own = [answer.block.host_us for answer in measured.by_rank if isinstance(answer, Measured)]
        assert own == [[100, 101, 102, 103], [90, 111, 92, 113]]
        assert measured.whole.block.host_us == [100, 111, 102, 113], "the slowest rank's, sample by sample"
        assert isinstance(ask(one, CollectMetrics()).whole, Collected)
    assert (tmp_path / "cell.rank1.log").exists()


@pytest.mark.parametrize(
    ("actions", "status", "words"),
    [
        ("kill:SIGKILL", Status.CRASH, "rank 1: the worker was killed by SIGKILL"),
        ("exit:3", Status.CRASH, "rank 1: the worker ended with exit code 3"),
        ("fail:run_error", Status.RUN_ERROR, "rank 1: told to fail"),
        ("fail:oom", Status.OOM, "rank 1: told to fail"),
        ("garbage", Status.BAD_OUTPUT, "rank 1: the worker sent a line that is not a message"),
    ],
)
def test_failing_rank_ends_the_cell_though_others_wait(
    tmp_path: Path, impatient: None, actions: str, status: Status, words: str
) -> None:
    with cell(tmp_path, compile_1=f"{actions}@measure", compile_0="hang@measure") as one:
        ask(one, prepare())
        ask(one, COMPILE)
        began = time.monotonic()
        answered = ask(one, MEASURE, timeout_s=60.0)
        assert time.monotonic() - began < 10
    assert isinstance(answered.whole, Failed)
    assert (answered.whole.status, answered.failed_rank) == (status, 1)
    assert answered.whole.error.startswith(words)
    assert "rank 0: the worker waited in phase 'measure' for another one that had failed" in answered.whole.error


def test_a_rank_that_hangs_ends_the_cell_when_its_time_is_over(tmp_path: Path, impatient: None) -> None:
    with cell(tmp_path, compile_1="deaf@measure,hang:traced@measure") as one:
        ask(one, prepare())
        answered = ask(one, MEASURE, timeout_s=1.0)
        process.await_exit(one.ranks[1:], 5.0)
        assert one.ranks[1].exited(), "what it has launched waits on its GPU, next to whoever is timed there"
        assert not one.ranks[0].exited()
    assert isinstance(answered.whole, Failed)
    assert (answered.whole.status, answered.failed_rank) == (Status.TIMEOUT, 1)
    assert isinstance(answered.by_rank[0], Measured), "the other one had answered"


def test_cause_of_a_ranks_death_comes_before_its_echoes(tmp_path: Path, impatient: None) -> None:
    with cell(tmp_path, compile_0="fail:run_error@measure", compile_1="slow:0.3@measure,kill:SIGKILL@measure") as one:
        ask(one, prepare())
        answered = ask(one, MEASURE)
    assert isinstance(answered.whole, Failed)
    assert (answered.whole.status, answered.failed_rank) == (Status.CRASH, 1)
    assert "rank 0: told to fail" in answered.whole.error


def test_what_all_ranks_say_is_said_once(tmp_path: Path) -> None:
    with cell(tmp_path, ranks=3, compile="fail:run_error@measure") as one:
        ask(one, prepare())
        answered = ask(one, MEASURE)
    assert isinstance(answered.whole, Failed)
    assert answered.whole.error.startswith("ranks 0, 1, 2: told to fail")
    assert answered.whole.error.count("told to fail") == 1


def test_a_row_has_the_parts_of_all_ranks(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(workloads=(SPLIT,), modes=COMPILE_MODE, processes=2)
    (row,) = read_run(bench.path).cells
    assert (row.workload, row.tp, row.status, row.processes) == ("FAKE@tp2", 2, Status.PASS, 2)
    assert [part.rank for part in row.ranks] == [0, 1]
    for part in row.ranks:
        assert [(block.process, block.index) for block in part.blocks] == [(p, i) for p in range(2) for i in range(5)]
        assert part.correctness is not None and part.compile is not None and part.metrics is not None
    for whole, first, second in zip(row.blocks, *(part.blocks for part in row.ranks), strict=True):
        assert whole.host_us == [max(pair) for pair in zip(first.host_us, second.host_us, strict=True)]


def test_dead_rank_becomes_a_row_and_leaves_no_process(tmp_path: Path, impatient: None) -> None:
    bench = Bench(tmp_path)
    bench.run({"compile#1": "kill:SIGKILL@measure"}, workloads=(SPLIT,), modes=COMPILE_MODE)
    (row,) = read_run(bench.path).cells
    assert row.status is Status.CRASH
    assert row.error is not None and row.error.startswith("rank 1:")
    assert row.log_tail is not None and "about to be killed" in row.log_tail, "the log of the rank that died"
    assert fake_workers_alive() == []


def test_real_ranks_that_wait_for_a_dead_one_end(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "suite", "run", "DECODER", "--tp", "2", "--modes", "eager"]
    options = ["--device", "cpu", "--size", "tiny", "--blocks", "100000", "--measure-s", "0"]
    run = subprocess.Popen(
        [*command, *options, "--out", str(tmp_path / "run")],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    )
    try:
        assert run.stderr is not None
        for line in run.stderr:
            if "eager: measure" in line:
                break
        ranks = [one for one in psutil.Process(run.pid).children() if "suite.worker.main" in " ".join(one.cmdline())]
        assert len(ranks) == 2
        os.kill(max(one.pid for one in ranks), signal.SIGKILL)
        began = time.monotonic()
        rest = run.stderr.read()
        assert run.wait(30) == 1, rest
        assert time.monotonic() - began < 25
    finally:
        run.kill()
        run.wait()
    assert living([one.pid for one in ranks]) == []
    row = json.loads((tmp_path / "run" / "cells.jsonl").read_text())
    assert row["status"] == "crash"
    assert "rank 1: the worker was killed by SIGKILL" in row["error"]


def test_degrees_and_names_are_checked() -> None:
    assert parse_degrees("1, 2,4,2") == (1, 2, 4)
    assert split_names(["xlnet-i"], (1, 2), None) == ["XLNET-I@tp1", "XLNET-I@tp2"]
    everything = split_names([], (2,), None)
    assert everything == [f"{name}@tp2" for name in ("DALLE2", "DECODER", "ST", "VM", "XLNET-I")]
    for wrong in ("", "0", "two", "1,-2", "65", "²"):
        with pytest.raises(WrongUse, match="--tp"):
            parse_degrees(wrong)
    for names, chosen in ((["EOS"], None), (["XLNET-I@tp2"], None), ([], "grace")):
        with pytest.raises(WrongUse):
            split_names(names, (2,), chosen)


def test_a_split_workload_is_a_row_of_its_own() -> None:
    row = find("xlnet-i@tp4")
    assert (row.acronym, row.tp, row.batch, row.sets) == ("XLNET-I@tp4", 4, 128, ())
    assert find("DALLE2@tp1").batch == 2
    for name in ("EOS@tp2", "XLNET-I@tp0", "XLNET-I@tp", "XLNET-I@tpx", "NONE@tp2"):
        with pytest.raises(UnknownWorkload):
            find(name)


def test_other_commands_take_no_workload_that_is_split() -> None:
    require_whole(find("XLNET-I@tp1"))
    with pytest.raises(WrongUse, match=r"XLNET-I@tp2 is split over 2 GPUs.*XLNET-I@tp1"):
        require_whole(find("XLNET-I@tp2"))
    with pytest.raises(WrongUse, match="split over 2"):
        find_targets(["xlnet-i@tp2"], variant=None, size="tiny")


def test_more_gpus_than_there_are_is_wrong_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from suite.cli.main import main
    from suite.run import launch

    monkeypatch.setattr(launch, "require_gpu", lambda: None)
    monkeypatch.setattr(launch, "visible_gpus", lambda: ["0", "1"])
    with pytest.raises(SystemExit) as ended:
        main(["run", "XLNET-I", "--tp", "2,4"])
    assert ended.value.code == 2
    assert "XLNET-I@tp4: 2 GPUs can be used here" in capsys.readouterr().err


def test_ranks_whose_results_differ_are_found() -> None:
    assert largest_spread([{"a": 2.0, "b": 0.0}, {"a": 2.0, "b": 0.0}]) == 0.0
    assert largest_spread([{"a": 2.0}, {"a": 1.0}]) == 0.5
    assert largest_spread([{"a": float("nan")}, {"a": float("nan")}]) == 0.0
    assert largest_spread([{"a": float("nan")}, {"a": 1.0}]) == float("inf")
    assert largest_spread([{"a": 1.0}, {"b": 1.0}]) == float("inf")


def test_the_worst_ranks_correctness_is_the_rows(tmp_path: Path) -> None:
    with cell(tmp_path) as one:
        ask(one, prepare())
        ask(one, COMPILE)
        answered = ask(one, Settle())
    first, second = (answer.correctness for answer in answered.by_rank if isinstance(answer, Prepared))
    assert first is not None and second is not None
    wrong = second.model_copy(update={"max_relative_error": 0.3, "digests": ["other"], "deterministic": False})
    joined = worst([first, wrong])
    assert joined is not None
    assert (joined.max_relative_error, joined.digests, joined.deterministic) == (0.3, first.digests, False)
    assert worst([None, None]) is None
