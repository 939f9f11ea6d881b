"""Processes of cells: every outcome becomes one answer of its cell, and no process remains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from fixtures.fake_runs import (
    default_signals,
    fake_worker,
    living,
    recorded_pids,
    wait_until,
)
from tiny_workloads import spec_of

from suite.results.schema import CompileConditions, Status
from suite.run import process, supervise
from suite.run.process import Answer, OnPhase, RankedWorker, converse, end, worst
from suite.run.supervise import kill_strays
from suite.worker.protocol import (
    Collect,
    Collected,
    Command,
    Compile,
    Done,
    Failed,
    Measure,
    Measured,
    Prepare,
    Prepared,
    Settle,
)

COMPILE = Compile(conditions=CompileConditions.COLD_ALONE)
MEASURE = Measure(index=1, turn=3, samples=4)
PREPARE = Prepare(spec=spec_of("FAKE", "compile"))


@contextmanager
def cell(folder: Path, *actions: str, ranks: int = 1, **behave: str) -> Iterator[RankedWorker]:
    told = {name.replace("_", "#"): each for name, each in behave.items()} or {"*": ",".join(actions)}
    one = RankedWorker(fake_worker(told, folder), folder / "log", ranks, "cpu")
    try:
        yield one
    finally:
        end([one], ask_first=False)
        assert one.rendezvous is None or not Path(one.rendezvous).parent.exists()


def ask(
    one: RankedWorker, command: Command, timeout_s: float = 20.0, on_phase: OnPhase = lambda cell, phase: None
) -> Answer:
    commands = [command] * len(one.ranks)
    if isinstance(command, Prepare):
        specs = (command.spec.model_copy(update={"rank": rank, "tp": len(commands)}) for rank in range(len(commands)))
        commands = [Prepare(spec=spec) for spec in specs]
    return converse({one: commands}, timeout_s, on_phase)[one]


def failure(one: RankedWorker, command: Command, timeout_s: float = 20.0) -> Failed:
    answer = ask(one, command, timeout_s)
    assert isinstance(answer, Failed), answer
    return answer


def test_good_worker_answers_commands_and_announces_phases(tmp_path: Path) -> None:
    phases: list[str] = []
    with cell(tmp_path) as one:
        for command, kind in ((PREPARE, Done), (COMPILE, Done), (Settle(), Prepared)):
            assert isinstance(ask(one, command, on_phase=lambda _, phase: phases.append(phase)), kind)
        assert phases == ["build", "check", "compile", "warm-up"]
        measured = ask(one, MEASURE)
        assert isinstance(measured, Measured)
        assert (measured.block.index, measured.block.turn, len(measured.block.host_us)) == (1, 3, 4)
        assert isinstance(ask(one, Collect(step="metrics")), Collected)


def test_answers_of_all_ranks_become_one(tmp_path: Path) -> None:
    with cell(tmp_path, ranks=2) as one:
        assert isinstance(ask(one, PREPARE), Done)
        assert isinstance(ask(one, COMPILE), Done)
        settled = ask(one, Settle())
        measured = ask(one, MEASURE)
        assert isinstance(measured, Measured)
        assert measured.block.host_us == [100, 111, 102, 113], "the slowest rank's, sample by sample"
        assert isinstance(ask(one, Collect(step="metrics")), Collected)
    assert (tmp_path / "log.rank1").exists()
    assert isinstance(settled, Prepared)
    first = settled.correctness
    assert first is not None
    wrong = first.model_copy(update={"max_relative_error": 0.3, "digests": ["other"], "deterministic": False})
    joined = worst([first, wrong])
    assert joined is not None
    assert (joined.max_relative_error, joined.digests, joined.deterministic) == (0.3, first.digests, False)
    assert worst([None, None]) is None


def test_workers_answer_concurrently(tmp_path: Path) -> None:
    with cell(tmp_path, "slow:2.0") as first, cell(tmp_path, "slow:2.0") as second:
        for one in (first, second):  # the interpreter's start is not what is timed
            assert isinstance(ask(one, PREPARE), Done)
        started = time.monotonic()
        answers = converse({first: [PREPARE], second: [PREPARE]}, 20.0)
        assert time.monotonic() - started < 3.8
    assert all(isinstance(answer, Done) for answer in answers.values())


@pytest.mark.parametrize(
    ("action", "status", "words"),
    [
        ("exit:3", Status.CRASH, "exit code 3"),
        ("exit:0", Status.CRASH, "exit code 0"),
        ("kill:SIGSEGV", Status.CRASH, "SIGSEGV"),
        ("kill:SIGKILL", Status.CRASH, "lack of memory"),
        ("garbage", Status.BAD_OUTPUT, "Traceback"),
        ("binary", Status.BAD_OUTPUT, "not a message"),
        ("partial", Status.CRASH, "exit code 0"),
        ("wrong", Status.BAD_OUTPUT, "answered 'prepare' with 'metrics'"),
        ("fail:oom", Status.OOM, "told to fail"),
    ],
)
def test_misbehaviour_becomes_a_status(tmp_path: Path, action: str, status: Status, words: str) -> None:
    with cell(tmp_path, action) as one:
        answer = failure(one, PREPARE)
        if action.startswith("exit"):
            assert failure(one, COMPILE).status is Status.CRASH, "a command to a gone worker is answered by its end"
    assert answer.status is status
    assert words in answer.error


@pytest.mark.parametrize(
    ("actions", "status", "words"),
    [
        ("kill:SIGKILL", Status.CRASH, "rank 1: the worker was killed by SIGKILL"),
        ("fail:run_error", Status.RUN_ERROR, "rank 1: told to fail"),
        ("fail:oom", Status.OOM, "rank 1: told to fail"),
        ("garbage", Status.BAD_OUTPUT, "rank 1: the worker sent a line that is not a message"),
    ],
)
def test_failing_rank_ends_the_cell_though_others_wait(
    tmp_path: Path, actions: str, status: Status, words: str
) -> None:
    with cell(tmp_path, ranks=2, compile_1=f"{actions}@measure", compile_0="hang@measure") as one:
        ask(one, PREPARE)
        began = time.monotonic()
        answered = ask(one, MEASURE, timeout_s=60.0)
        assert time.monotonic() - began < 10
    assert isinstance(answered, Failed)
    assert (answered.status, answered.rank) == (status, 1)
    assert answered.error.startswith(words)


def test_hanging_rank_ends_the_cell_at_its_time_limit(tmp_path: Path) -> None:
    with cell(tmp_path, ranks=2, compile_1="deaf@measure,hang:traced@measure") as one:
        ask(one, PREPARE)
        answered = ask(one, MEASURE, timeout_s=1.0)
        assert one.ranks[1].exited(), "what it has launched waits on its GPU, next to the process that is timed there"
    assert isinstance(answered, Failed)
    assert (answered.status, answered.rank) == (Status.TIMEOUT, 1)


@pytest.mark.parametrize("action", ["hang:traced", "phases"])
def test_worker_without_progress_times_out(tmp_path: Path, action: str) -> None:
    with cell(tmp_path, action) as one:
        answer = failure(one, PREPARE, timeout_s=2.0)
        assert action == "phases" or "in do_hang" in one.ranks[0].log_tail()
    assert answer.status is Status.TIMEOUT
    assert "2 s" in answer.error


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether the process has a handler for the signal."""
    (caught,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_real_worker_writes_the_tracebacks_of_its_threads(tmp_path: Path) -> None:
    cell = RankedWorker(process.WORKER_COMMAND, tmp_path / "log", 1, "cpu")
    (one,) = cell.ranks
    try:
        wait_until(lambda: catches(one.pid, signal.SIGUSR1), one.log_tail)

        def has_written() -> bool:
            one.write_tracebacks()  # it may not be there yet
            return "in serve" in one.log_tail() and "in watch" in one.log_tail()

        wait_until(has_written, one.log_tail)
    finally:
        end([cell], ask_first=False)


def test_each_phase_has_its_own_time(tmp_path: Path) -> None:
    with cell(tmp_path, "slow:1.5", "slow:1.5@measure") as one:
        started = time.monotonic()
        assert isinstance(ask(one, PREPARE, timeout_s=4.0), Done)
        assert isinstance(ask(one, MEASURE, timeout_s=4.0), Measured)
        assert time.monotonic() - started > 3.0


def test_waiting_for_others_to_compare_extends_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        three = [stack.enter_context(cell(tmp_path, "compare:2@settle")) for _ in range(3)]
        monkeypatch.setattr(process, "EXIT_GRACE_S", 0.1)
        converse({each: [PREPARE] for each in three}, 60.0)
        started = time.monotonic()
        answers = converse({each: [Settle()] for each in three}, 3.0)
    assert time.monotonic() - started > 6.0
    assert all(isinstance(answer, Prepared) for answer in answers.values()), answers


def test_worker_hanging_while_comparing_releases_the_lock(tmp_path: Path) -> None:
    with cell(tmp_path, "compare@settle") as hangs, cell(tmp_path, "slow:1@settle,compare:0.1@settle") as waits:
        converse({hangs: [PREPARE], waits: [PREPARE]}, 60.0)
        answers = converse({hangs: [Settle()], waits: [Settle()]}, 3.0)
        assert living([hangs.ranks[0].pid]) == []
    assert isinstance(answers[waits], Prepared)
    failed = answers[hangs]
    assert isinstance(failed, Failed) and failed.status is Status.TIMEOUT
    assert failed.error == "the worker took more than 3 s in phase 'compare'"


def test_log_has_the_output_of_this_worker_only(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of an earlier worker\n")
    with cell(tmp_path, "exit:1") as one:
        failure(one, PREPARE)
        tail = one.ranks[0].log_tail()
    assert "fake worker of FAKE compile" in tail and "about to exit" in tail
    assert "earlier" not in tail


def test_unresponsive_worker_and_its_children_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "TERM_GRACE_S", 0.3)
    with cell(tmp_path, "deaf", "child", "stray") as one:
        ask(one, PREPARE)
        pids = [one.ranks[0].pid, *recorded_pids(tmp_path)]
        assert len(pids) == 3
        kill_strays({"another worker's mark"})
        assert living(pids, within_s=0.2) == pids
    assert living(pids) == []


def test_worker_that_ignores_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_GRACE_S", 0.5)
    with cell(tmp_path, "hang@stop") as one:
        ask(one, PREPARE)
        end([one], ask_first=True)
        assert living([one.ranks[0].pid]) == []
        one.ranks.clear()


def test_worker_leaves_no_descriptor_and_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with cell(tmp_path) as one:
        ask(one, PREPARE)
        assert list(tmp_path.glob("encore-*"))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert not list(tmp_path.glob("encore-*"))


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
    assert (row["workload"], row["tp"], row["status"]) == ("DECODER@tp2", 2, "crash")
    assert "rank 1: the worker was killed by SIGKILL" in row["error"]
