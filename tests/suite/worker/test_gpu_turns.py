"""Processes share a GPU: several call at the same time, one locks it exclusively, and none waits forever."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import suite.worker.gpu_turns
from suite.worker.gpu_turns import GpuTurns, alone_to_tune

OTHER = """
import sys
from pathlib import Path
from suite.worker.gpu_turns import GpuTurns
with getattr(GpuTurns(Path(sys.argv[1])), sys.argv[2])():
    print("has it", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other(file: Path, turn: str) -> Iterator[subprocess.Popen[str]]:
    """Start another process that holds such a lock until its input ends."""
    command = [sys.executable, "-c", OTHER, str(file), turn]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "has it\n"
            yield process
        finally:
            process.kill()


def gets(turns: GpuTurns, turn: str) -> bool:
    """Return whether it gets this lock before its wait ends."""
    begin = time.monotonic()
    with getattr(turns, turn)():
        return time.monotonic() - begin < suite.worker.gpu_turns.MOST_WAIT_S


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.worker.gpu_turns, "MOST_WAIT_S", 0.3)


@pytest.mark.parametrize(
    ("theirs", "ours", "possible"),
    [
        ("calling", "calling", True),
        ("calling", "alone", False),
        ("alone", "calling", False),
        ("alone", "alone", False),
    ],
)
def test_gpu_lock_admits_compatible_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], theirs: str, ours: str, possible: bool
) -> None:
    file = tmp_path / "cache" / "turns"
    with other(file, theirs):
        assert gets(GpuTurns(file), ours) is possible
        assert ("going on next to it" in capfd.readouterr().out) is not possible, "a log says what timings may suffer"


def test_gpu_lock_reports_its_waiting_time(tmp_path: Path) -> None:
    turns = GpuTurns(tmp_path / "turns")
    with turns.calling(), turns.alone():
        pass
    assert turns.waited_s == 0.0
    with other(tmp_path / "turns", "alone"), turns.calling():
        assert 0.3 <= turns.waited_s < 5.0


def test_gpu_lock_ends_with_its_block_or_process(tmp_path: Path) -> None:
    turns, again = GpuTurns(tmp_path / "turns"), GpuTurns(tmp_path / "turns")
    with pytest.raises(KeyError), turns.alone():
        raise KeyError
    assert gets(again, "alone")
    with other(tmp_path / "turns", "alone") as process:
        process.kill()
        process.wait()
        assert gets(again, "alone")


def test_exclusive_process_may_call_and_keeps_the_gpu(tmp_path: Path) -> None:
    turns, others = GpuTurns(tmp_path / "turns"), GpuTurns(tmp_path / "turns")
    with turns.alone():
        with turns.calling(), turns.alone():
            assert not gets(others, "calling")
        assert not gets(others, "calling")
    assert gets(others, "alone")


def test_tuning_call_does_not_wait_for_another_tuning_call(tmp_path: Path) -> None:
    """Each releases its lock for calls before it locks the GPU, and takes it again afterwards."""
    turns, others = GpuTurns(tmp_path / "turns"), GpuTurns(tmp_path / "turns")
    with turns.calling(), others.calling():
        begin = time.monotonic()
        with pytest.raises(KeyError), turns.alone():
            raise KeyError  # it waited without success: the other one calls
        assert time.monotonic() - begin >= suite.worker.gpu_turns.MOST_WAIT_S
        assert not gets(others, "alone"), "the turn to call is back"
    with turns.calling():
        with turns.alone():
            assert not gets(others, "calling")
        assert gets(others, "calling")


def test_tuning_waits_for_launched_work_before_it_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A collective ends when the other rank has launched its part, and that rank may wait for the lock of its GPU."""
    turns, others = GpuTurns(tmp_path / "turns"), GpuTurns(tmp_path / "turns")
    free: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: free.append(gets(others, "alone")))
    with alone_to_tune(turns, "cuda"):
        free.append(gets(others, "calling"))
    assert free == [True, False]
