"""`encore explain` around fake workers: progress, interrupts, and processes left when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fixtures.fake_runs import default_signals, living, wait_until

from suite.explain import run
from suite.explain.run import explain_many
from suite.explain.targets import Target
from suite.results.errors import EncoreError
from suite.run import asked

FAKE_WORKER = Path(__file__).parents[2] / "support" / "fixtures" / "fake_explain_worker.py"
ENCORE = f"""
import sys
from suite.cli.main import main
from suite.explain import run
run.WORKER_COMMAND = (sys.executable, {str(FAKE_WORKER)!r})
main()
"""


@pytest.fixture
def fake_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "WORKER_COMMAND", (sys.executable, str(FAKE_WORKER)))


class Explaining:
    """A running `encore explain` of one target that answers and one that hangs, once the second has begun to hang."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        pids = folder / "pids"
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENCORE, "explain", "any:quick", "any:hang", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "ENCORE_TEST_PIDS": str(pids)},
            preexec_fn=default_signals,
        )
        wait_until(lambda: pids.exists() or self.process.poll() is not None)
        assert pids.exists(), self.process.communicate()
        worker, child, temporary = pids.read_text().split()
        self.pids, self.temporary = [int(worker), int(child)], Path(temporary)
        assert self.temporary.is_dir() and living(self.pids, within_s=0.0) == self.pids


def test_interrupt_keeps_what_is_finished(tmp_path: Path) -> None:
    explaining = Explaining(tmp_path, "--out", str(tmp_path / "out"))
    wait_until((tmp_path / "out" / "any.quick.json").exists)
    time.sleep(0.3)
    explaining.process.send_signal(signal.SIGINT)
    _, err = explaining.process.communicate(timeout=60)
    assert explaining.process.returncode == 130
    assert json.loads((tmp_path / "out" / "any.quick.json").read_text())["target"] == "any:quick"
    assert "interrupted: 1 of 2 are explained" in err
    assert living(explaining.pids, within_s=10.0) == []
    wait_until(lambda: not explaining.temporary.exists())


def test_killed_command_leaves_no_worker(tmp_path: Path) -> None:
    explaining = Explaining(tmp_path)
    explaining.process.kill()
    explaining.process.communicate()
    worker, child = explaining.pids
    assert living([worker], within_s=10.0) == []
    os.kill(child, signal.SIGKILL)  # it has left the worker's session


@pytest.mark.usefixtures("fake_workers")
def test_explain_names_the_line_where_a_target_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "SAY_S", 0.5)
    said: list[str] = []
    ((_, explanation),) = explain_many([Target("any:hang", None)], timeout_s=2.0, say=said.append)
    assert len(said) >= 2 and said[0].startswith("any:hang: explaining it for "), "a slow target has lines meanwhile"
    error = explanation.error
    assert error is not None
    assert "used no processor time for 2 s" in error
    assert "in hang_in_make" in error


@pytest.mark.usefixtures("fake_workers")
def test_file_that_cannot_be_written_ends_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def full(path: Path, content: str) -> None:
        wait_until(pids.exists)
        raise EncoreError("cannot write")

    monkeypatch.setattr(run, "write_atomically", full)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})  # both targets at once
    monkeypatch.setenv("ENCORE_TEST_PIDS", str(pids))
    with pytest.raises(EncoreError, match="cannot write"):
        list(explain_many([Target("any:quick", None), Target("any:hang", None)], out=tmp_path / "out"))
    worker, child, _ = pids.read_text().split()
    assert living([int(worker), int(child)], within_s=10.0) == []
