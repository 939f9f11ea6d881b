"""`python -m host_tuning check`, `tune` and `restore` as processes, on a tree of a kernel's files, and ended midway."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from fixtures.fake_host import FakeHost
from fixtures.fake_runs import default_signals, wait_until

from host_tuning.machine import CPU, NO_TURBO
from host_tuning.state import STATE

TUNE = ("tune", "--governor", "--frequency", "base", "--no-turbo", "--c-states")
LAST = f"{CPU}/cpu3/cpuidle/state2/disable"


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
    """Each change is printed before it is made. The output pipe is not read and has room for the lines of half of them,
    so `tune` waits after the last of these changes."""
    host = FakeHost(tmp_path)
    before = host.snapshot()
    lines = run(tmp_path, *TUNE, "--dry-run").stdout.replace("would ", "").splitlines(keepends=True)
    taken = lines[: len(lines) // 2]
    ((value, file),) = re.findall(r"write '(.+)' to /(\S+)", taken[-1])
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * (size - len("".join(taken))))
    process = subprocess.Popen(
        command(tmp_path, *TUNE), stdout=writer, stderr=subprocess.PIPE, preexec_fn=default_signals
    )
    os.close(writer)
    wait_until(lambda: host.read(file) == value or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    os.close(reader)
    assert process.returncode == 1
    assert said == b"host_tuning: interrupted; everything is as it was before\n"
    assert host.snapshot() == before and not (tmp_path / STATE.relative_to("/")).exists()
