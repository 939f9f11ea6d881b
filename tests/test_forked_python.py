"""A program that is forked off the server is as one in an interpreter of its own, and is a child of who started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import forked_python
import psutil
import pytest
from host_gpu import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="nothing is forked where there is a GPU")

SAYS = """
import json, os, signal, sys, threading
hidden = sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy", "suite", "optimizations"))
import numpy
early = "torch" in sys.modules
import torch
print(json.dumps({
    "arguments": sys.argv, "name": __name__, "file": __file__, "hidden": hidden, "early": early,
    "compilers": "torch._inductor" in sys.modules, "spec": torch.__spec__.name, "from": str(torch.__loader__)[:40],
    "variables": sorted((n, v) for n, v in os.environ.items() if n not in ("LC_CTYPE", "_")),
    "leads": os.getpid() == os.getpgid(0) == os.getsid(0), "group": os.getpid() == os.getpgid(0) or os.getpgid(0),
    "parent": os.getppid(), "folder": os.getcwd(), "input": sys.stdin.read(), "threads": torch.get_num_threads(),
    "signals": {n.name: repr(signal.getsignal(n)) for n in signal.valid_signals() if isinstance(n, signal.Signals)},
    "masked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "path": sys.path,
    "main thread": threading.current_thread() is threading.main_thread(),
    "passed": os.read(int(sys.argv[1]), 9).decode(),
    "open": sorted(n for n in range(40) if os.path.exists(f"/proc/self/fd/{n}")),
}))
print("to the other stream", file=sys.stderr)
if sys.argv[2] == "raises":
    raise ValueError("it was told to")
if sys.argv[2] == "says":
    sys.exit("and so it ends")
sys.exit(int(sys.argv[2]))
"""


def outcome(command: list[str], folder: Path, **options: Any) -> tuple[Any, list[str], int]:
    read, write = os.pipe()
    os.write(write, b"a message")
    os.close(write)
    here = 30  # the same number for both
    os.dup2(read, here)
    os.close(read)
    try:
        done = subprocess.run(
            [arg.replace("FD", str(here)).replace("FOLDER", str(folder)) for arg in command],
            cwd=folder, pass_fds=[here], capture_output=True, text=True, input="typed", timeout=100, **options,
        )  # fmt: skip
    finally:
        os.close(here)
    assert done.stdout, done.stderr
    said = [line for line in done.stderr.splitlines() if "to the other" in line or "told to" in line or "ends" in line]
    return json.loads(done.stdout), said, done.returncode


@pytest.mark.parametrize(
    ("how", "ending", "session"),
    [
        (["-P", "FOLDER/says.py"], "0", True),
        (["FOLDER/says.py"], "raises", False),
        (["-m", "says"], "7", False),
        (["-P", "-m", "says"], "says", True),
    ],
)
def test_a_fork_is_as_an_interpreter_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: list[str], ending: str, session: bool
) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "2", "OF_A_TEST": "1"}
    command = [sys.executable, *how, "FD", ending]
    alone = outcome(command, tmp_path, env=env, start_new_session=session)
    monkeypatch.setattr(subprocess, "Popen", forked_python.ForkedPopen)
    forked = outcome(command, tmp_path, env=env, start_new_session=session)
    assert {key: (forked[0][key], said) for key, said in alone[0].items() if forked[0][key] != said} == {}
    assert forked[1:] == alone[1:]
    assert forked[0]["hidden"] == [] and not forked[0]["early"]
    assert forked[0]["parent"] == os.getpid()


def test_only_programs_are_forked(forked_python: None) -> None:
    """Others may be about Python's start: `-c`, and flags other than -P."""
    for command in (["-c", "print(1)"], ["-I", "-m", "this"], ["-W", "ignore", "-m", "this"]):
        process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
        line = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
        assert process.wait(60) == 0
        assert "forked_python" not in line


def test_a_forked_program_can_be_killed_with_its_group_and_orphans_are_not_taken_in(
    tmp_path: Path, forked_python: None
) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import subprocess, time\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        sleeps = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
        assert psutil.Process(sleeps).ppid() != os.getpid()
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(sleeps) and psutil.Process(sleeps).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_threads_can_start_programs_at_the_same_time(tmp_path: Path, forked_python: None) -> None:
    script = tmp_path / "says.py"
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    ended: dict[int, int] = {}

    def run(number: int) -> None:
        ended[number] = subprocess.run([sys.executable, str(script), str(number)]).returncode

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == {number: number for number in range(8)}


def test_pytorch_with_other_settings_is_imported_anew_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", forked_python.ForkedPopen)
    script = tmp_path / "says.py"
    script.write_text(
        "import os, sys\nos.environ.update(a.split('=') for a in sys.argv[1:])\n"
        "import torch._inductor.config as c\nprint(c.max_autotune, c.compile_threads)"
    )

    def said(*arguments: str, **variables: str) -> str:
        command = [sys.executable, str(script), *arguments]
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
        return done.stdout.strip() or done.stderr.splitlines()[-1]

    assert said("TORCHINDUCTOR_COMPILE_THREADS=5") == "False 5"
    assert "imported with other values of ['TORCHINDUCTOR_MAX_AUTOTUNE']" in said("TORCHINDUCTOR_MAX_AUTOTUNE=1")
    monkeypatch.setattr(forked_python, "server", forked_python.Server())  # so that the other one stays
    assert said(TORCHINDUCTOR_MAX_AUTOTUNE="1", TORCHINDUCTOR_COMPILE_THREADS="3") == "True 3"
    forked_python.server._stop()
