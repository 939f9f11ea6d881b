"""Worker processes: whatever one does becomes an answer, and nothing of it is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fixtures.fake_runs import fake_worker, living, recorded_pids

from suite.results.schema import CompileConditions, Status
from suite.run import process, supervise
from suite.run.process import Answer, Worker, converse, end
from suite.run.supervise import kill_strays
from suite.worker.protocol import (
    Built,
    CellSpec,
    Collected,
    CollectMetrics,
    Command,
    Compile,
    Compiled,
    Failed,
    Measure,
    Measured,
    Prepare,
    Prepared,
    Settle,
)

COMPILE = Compile(conditions=CompileConditions.COLD_ALONE)
MEASURE = Measure(index=1, turn=3, samples=4, throughput_iterations=2)


def prepare(mode: str = "compile") -> Prepare:
    return Prepare(
        spec=CellSpec(
            workload="FAKE",
            variant="published",
            size="tiny",
            mode=mode,
            device="cpu",
            with_optimizer=False,
            seed=1,
            input_sets=4,
            warm_up=1,
            check_inputs=2,
            cpu_threads=1,
            cache_dir="unused",
            warm_cache=False,
        )
    )


@contextmanager
def worker(folder: Path, *actions: str) -> Iterator[Worker]:
    one = Worker(fake_worker({"*": ",".join(actions)}, folder), folder / "log")
    try:
        yield one
    finally:
        end([one], ask_first=False)


def ask(one: Worker, command: Command, timeout_s: float = 20.0) -> Answer:
    return converse({one: command}, timeout_s)[one]


def failure(one: Worker, command: Command, timeout_s: float = 20.0) -> Failed:
    answer = ask(one, command, timeout_s)
    assert isinstance(answer, Failed), answer
    return answer


def test_good_worker_answers_commands_and_announces_phases(tmp_path: Path) -> None:
    phases: list[str] = []
    with worker(tmp_path) as one:
        for command, kind in ((prepare(), Built), (COMPILE, Compiled), (Settle(), Prepared)):
            answer = converse({one: command}, 20.0, lambda _, phase: phases.append(phase))[one]
            assert isinstance(answer, kind)
        assert phases == ["build", "check", "compile", "warm-up"]
        measured = ask(one, MEASURE)
        assert isinstance(measured, Measured)
        assert (measured.block.index, measured.block.turn, len(measured.block.host_us)) == (1, 3, 4)
        assert isinstance(ask(one, CollectMetrics()), Collected)


def test_workers_answer_side_by_side(tmp_path: Path) -> None:
    with worker(tmp_path, "slow:2.0") as first, worker(tmp_path, "slow:2.0") as second:
        for one in (first, second):  # the interpreter's start is not what is timed
            assert isinstance(ask(one, prepare()), Built)
        started = time.monotonic()
        answers = converse({first: prepare(), second: prepare()}, 20.0)
        assert time.monotonic() - started < 3.8
    assert all(isinstance(answer, Built) for answer in answers.values())


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
        ("huge", Status.BAD_OUTPUT, "bytes at once"),
        ("wrong", Status.BAD_OUTPUT, "answered 'prepare' with 'metrics'"),
        ("fail:oom", Status.OOM, "told to fail"),
        ("fail:pass", Status.BAD_OUTPUT, "answered 'prepare' with 'failed'"),
    ],
)
def test_misbehaviour_becomes_a_status(tmp_path: Path, action: str, status: Status, words: str) -> None:
    with worker(tmp_path, action) as one:
        answer = failure(one, prepare())
    assert answer.status is status
    assert words in answer.error


def test_a_block_that_was_not_asked_for_is_bad_output(tmp_path: Path) -> None:
    with worker(tmp_path, "short@measure") as one:
        ask(one, prepare())
        assert failure(one, MEASURE).status is Status.BAD_OUTPUT


def test_closed_pipe_of_a_living_process_is_bad_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "EXIT_GRACE_S", 0.3)
    with worker(tmp_path, "close") as one:
        answer = failure(one, prepare(), timeout_s=60.0)
    assert answer.status is Status.BAD_OUTPUT
    assert "closed its reply pipe" in answer.error


@pytest.mark.parametrize("action", ["hang", "phases"])
def test_a_worker_that_does_not_get_on_times_out(tmp_path: Path, action: str) -> None:
    with worker(tmp_path, action) as one:
        answer = failure(one, prepare(), timeout_s=2.0)
    assert answer.status is Status.TIMEOUT
    assert "2 s" in answer.error


def test_ranks_waiting_for_one_without_memory_are_ended_first(tmp_path: Path) -> None:
    with worker(tmp_path, "fail:oom") as short, worker(tmp_path, "hang") as waits:
        both = (short, waits)
        answers = converse({one: prepare() for one in both}, 20.0, companions=dict.fromkeys(both, both))
        assert [one.exited() for one in both] == [True, True]
    assert [answers[one].status for one in both] == [Status.OOM, Status.TIMEOUT]


def test_log_of_a_stuck_worker_says_where_it_is(tmp_path: Path) -> None:
    with worker(tmp_path, "hang:traced") as one:
        assert failure(one, prepare(), timeout_s=2.0).status is Status.TIMEOUT
        assert "in do_hang" in one.log_tail()


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal."""
    (caught,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_a_real_worker_writes_the_tracebacks_of_its_threads(tmp_path: Path) -> None:
    one = Worker(process.WORKER_COMMAND, tmp_path / "log")
    try:
        deadline = time.monotonic() + 30.0
        while not catches(one.pid, signal.SIGUSR1):
            assert time.monotonic() < deadline, one.log_tail()
            time.sleep(0.05)
        one.write_tracebacks()
        while not ("in serve" in one.log_tail() and "in _follow_runner" in one.log_tail()):  # it may not be there yet
            assert time.monotonic() < deadline, one.log_tail()
            time.sleep(0.05)
            one.write_tracebacks()
    finally:
        end([one], ask_first=False)


def test_each_phase_has_its_own_time(tmp_path: Path) -> None:
    with worker(tmp_path, "slow:1.5", "slow:1.5@measure") as one:
        started = time.monotonic()
        assert isinstance(ask(one, prepare(), timeout_s=4.0), Built)
        assert isinstance(ask(one, MEASURE, timeout_s=4.0), Measured)
        assert time.monotonic() - started > 3.0


def test_waiting_for_others_to_compare_extends_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        three = [stack.enter_context(worker(tmp_path, "compare:2@settle")) for _ in range(3)]
        monkeypatch.setattr(process, "EXIT_GRACE_S", 0.1)
        converse({each: prepare() for each in three}, 60.0)
        started = time.monotonic()
        answers = converse({each: Settle() for each in three}, 3.0)
    assert time.monotonic() - started > 6.0
    assert all(isinstance(answer, Prepared) for answer in answers.values()), answers


def test_worker_that_hangs_while_comparing_passes_the_turn_on(tmp_path: Path) -> None:
    with worker(tmp_path, "compare@settle") as hangs, worker(tmp_path, "slow:1@settle,compare:0.1@settle") as waits:
        converse({hangs: prepare(), waits: prepare()}, 60.0)
        started = time.monotonic()
        answers = converse({hangs: Settle(), waits: Settle()}, 3.0)
        assert living([hangs.pid]) == []
    assert isinstance(answers[waits], Prepared)
    failed = answers[hangs]
    assert isinstance(failed, Failed) and failed.status is Status.TIMEOUT
    assert failed.error == "the worker took more than 3 s in phase 'compare'"
    assert time.monotonic() - started < 15.0


def test_command_to_a_gone_worker_is_answered_by_its_end(tmp_path: Path) -> None:
    with worker(tmp_path, "exit:7@measure") as one:
        ask(one, prepare())
        failure(one, MEASURE)
        assert failure(one, CollectMetrics()).status is Status.CRASH


def test_the_log_has_what_this_worker_printed_and_no_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of an earlier worker\n")
    with worker(tmp_path, "exit:1") as one:
        failure(one, prepare())
        tail = one.log_tail()
    assert "fake worker of FAKE compile" in tail
    assert "about to exit" in tail
    assert "earlier" not in tail


def test_a_deaf_worker_and_its_children_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "TERM_GRACE_S", 0.3)
    with worker(tmp_path, "deaf", "child", "stray", "hang") as one:
        failure(one, prepare(), timeout_s=2.0)
        pids = [one.pid, *recorded_pids(tmp_path)]
        assert len(pids) == 3
    assert living(pids) == []


def test_children_of_a_stopped_worker_are_killed(tmp_path: Path) -> None:
    one = Worker(fake_worker({"*": "child,stray"}, tmp_path), tmp_path / "log")
    ask(one, prepare())
    end([one], ask_first=True)
    pids = recorded_pids(tmp_path)
    assert len(pids) == 2
    assert living(pids) == []


def test_a_worker_that_ignores_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_GRACE_S", 0.5)
    one = Worker(fake_worker({"*": "hang@stop"}), tmp_path / "log")
    ask(one, prepare())
    end([one], ask_first=True)
    assert living([one.pid]) == []


def test_kill_strays_leaves_processes_without_the_mark_alone(tmp_path: Path) -> None:
    with worker(tmp_path, "stray") as one:
        ask(one, prepare())
        (stray,) = recorded_pids(tmp_path)
        kill_strays({"another worker's mark"})
        assert living([stray], within_s=0.2) == [stray]
        kill_strays({one.mark})
        assert living([stray]) == []


def test_a_worker_leaves_no_open_descriptor(tmp_path: Path) -> None:
    end([Worker(fake_worker({}, tmp_path), tmp_path / "first")], ask_first=False)  # the first one starts the guard
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with worker(tmp_path) as one:
        ask(one, prepare())
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
