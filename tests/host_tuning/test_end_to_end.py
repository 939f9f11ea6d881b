"""`python -m host_tuning check`, `tune` and `restore` as processes, on a tree of a kernel's files, and ended midway."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fixtures.fake_host import FakeHost

from host_tuning.machine import CPU, NO_TURBO
from host_tuning.state import STATE

TUNE = ("tune", "--governor", "--frequency", "base", "--no-turbo", "--c-states")
FIRST = f"{CPU}/cpufreq/policy0/scaling_governor"
LAST = f"{CPU}/cpu3/cpuidle/state2/disable"
FREE_BYTES = 1100
"""What the standard output of an interrupted `tune` takes before it blocks: the lines of about half of its changes."""


def command(root: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-u", "-m", "host_tuning", *arguments, "--root", str(root)]


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(root, *arguments), capture_output=True, text=True, timeout=120)


def warned(root: Path) -> set[str]:
    """Return the items that `check` warns of; its exit code says the same."""
    done = run(root, "check", "--json")
    found = {each["item"] for each in json.loads(done.stdout) if each["verdict"] == "warn"}
    assert done.returncode == (1 if found else 0), done.stderr
    return found


def stopped_midway(root: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start `tune` with an output pipe that fills up, so that it waits between two changes; with the pipe.

    Each change is printed before it is made, and a pipe that nobody reads takes only so much.
    """
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * (size - FREE_BYTES))
    process = subprocess.Popen(command(root, *TUNE), stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    deadline = time.monotonic() + 60
    seen: list[str] = []
    while "performance" not in (root / FIRST).read_text() or len(seen) < 5 or len(set(seen[-5:])) > 1:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
        seen.append(" ".join(path.read_text() for path in sorted((root / "sys").rglob("*")) if path.is_file()))
    assert (root / LAST).read_text().strip() == "0", "the last change is not made yet"
    return process, reader


def test_tune_quiets_what_check_warns_of_and_restore_undoes_it(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    before, state = host.snapshot(), tmp_path / STATE.relative_to("/")
    disturbed = warned(tmp_path)
    assert {"governor", "frequency", "turbo", "c_states"} <= disturbed

    tuned = run(tmp_path, *TUNE)
    assert tuned.returncode == 0, tuned.stderr
    assert "changes made" in tuned.stdout and state.exists()
    assert host.read(NO_TURBO) == "1" and host.read(LAST) == "1"
    assert warned(tmp_path) == disturbed - {"governor", "frequency", "turbo", "c_states"}

    assert run(tmp_path, *TUNE).returncode == 2, "a tuned host is not tuned again"
    restored = run(tmp_path, "restore")
    assert restored.returncode == 0, restored.stderr
    assert host.snapshot() == before and not state.exists()
    assert warned(tmp_path) == disturbed


def test_ctrl_c_in_the_middle_puts_everything_back(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    before = host.snapshot()
    process, reader = stopped_midway(tmp_path)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    os.close(reader)
    assert process.returncode == 1
    assert said == b"host_tuning: interrupted; everything is as it was before\n"
    assert host.snapshot() == before and not (tmp_path / STATE.relative_to("/")).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_restore_puts_back_what_a_killed_tune_left(tmp_path: Path, number: signal.Signals) -> None:
    host = FakeHost(tmp_path)
    before, state = host.snapshot(), tmp_path / STATE.relative_to("/")
    process, reader = stopped_midway(tmp_path)
    process.send_signal(number)
    process.communicate(timeout=60)
    os.close(reader)
    assert process.returncode == -number
    assert state.exists() and host.snapshot() != before

    assert run(tmp_path, *TUNE).returncode == 2, "restore comes first"
    restored = run(tmp_path, "restore")
    assert restored.returncode == 0, restored.stderr
    assert host.snapshot() == before and not state.exists()
