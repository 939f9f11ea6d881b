"""What a killed program leaves: nothing. The program here is a small one that is killed with SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fixtures.fake_runs import living

from suite.run import guard
from suite.run.supervise import Supervised, end

PROGRAM = r'''
import subprocess, sys, time
from pathlib import Path
from suite.run.guard import temporary_folder
from suite.run.supervise import Supervised

SLEEP = "import time; time.sleep(600)"
STRAY = f"""if True:
    import subprocess, sys, tempfile
    print(tempfile.mkdtemp())
    print(subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True).pid, flush=True)
    {SLEEP}
"""
with temporary_folder("encore-test-guard-") as folder:
    (folder / "kernel.so").write_text("compiled")
    worker = Supervised([sys.executable, "-c", STRAY], Path(sys.argv[1]))
    while len(worker.log_tail().split()) < 2:
        time.sleep(0.02)
    print(folder, worker.pid, *worker.log_tail().split(), flush=True)
    time.sleep(600)
'''


def gone(path: Path, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not path.exists()


def test_killed_program_leaves_no_worker_stray_or_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "log")]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert program.stdout is not None
    folder, worker, temporary, stray = program.stdout.readline().split()
    pids = [int(worker), int(stray)]
    assert Path(folder, "kernel.so").exists() and Path(temporary).is_dir()
    assert living(pids, within_s=0.0) == pids
    os.killpg(program.pid, signal.SIGKILL)  # with all that is in its group, as a terminal's `kill -9 -PGID` does
    program.wait()
    program.stdout.close()
    assert gone(Path(folder)) and gone(Path(temporary).parent)
    assert living(pids, within_s=10.0) == []


def test_the_guard_itself_ends_with_its_program(tmp_path: Path) -> None:
    code = "from suite.run import guard; guard.new_mark(); print(guard.RUN_MARK)"
    mark = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    deadline = time.monotonic() + 10
    while _guards(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _guards(mark) == []


def test_a_guard_that_was_killed_takes_nothing_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(guard, "_pipe_fd", write)
    with guard.temporary_folder("encore-test-guard-") as folder:
        assert folder.is_dir()
        process = Supervised([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")
        end([process])
    os.close(write)
    assert not folder.exists()
    assert living([process.pid]) == []


def test_temporary_files_of_a_process_go_with_it(tmp_path: Path) -> None:
    code = "import tempfile, time; print(tempfile.mkdtemp(), flush=True); time.sleep(600)"
    process = Supervised([sys.executable, "-c", code], tmp_path / "log")
    while not (made := process.log_tail()):
        time.sleep(0.02)
    assert Path(made).is_dir()
    end([process])
    assert not Path(made).exists() and not Path(made).parent.exists()


def test_a_folder_is_gone_when_its_block_fails() -> None:
    with pytest.raises(ZeroDivisionError), guard.temporary_folder("encore-test-guard-") as folder:
        raise ZeroDivisionError
    assert not folder.exists()


def test_only_processes_with_a_wanted_mark_are_killed(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    processes = [subprocess.Popen(sleep, env={**os.environ, guard.MARK: f"test-{name}"}) for name in ("one", "other")]
    try:
        guard.kill_marked(lambda mark: mark == "test-one")
        assert processes[0].wait(timeout=10) == -signal.SIGKILL
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _guards(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
