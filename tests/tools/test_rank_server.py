"""A rank forked from the server behaves as one in its own interpreter until it exits."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from ranks_on_cpu import RankProgram

SCRIPT = """
import atexit, json, os, signal, sys, threading
import __main__


class Last:
    def __del__(self, say=os.write):
        say(1, b"torn down\\n")


last = Last()
atexit.register(print, "at exit")
private = [name for name in vars() if name.startswith("__")]
print(json.dumps({
    "arguments": sys.argv, "main": sorted(private), "name": __name__, "file": __file__, "same": __main__.last is last,
    "variables": sorted((n, v) for n, v in os.environ.items() if n not in ("RANK", "LOCAL_RANK", "LC_CTYPE", "_")),
    "leads": os.getpid() == os.getpgid(0) == os.getsid(0), "folder": os.getcwd(), "input": sys.stdin.read(),
    "signals": {n.name: repr(signal.getsignal(n)) for n in signal.valid_signals() if isinstance(n, signal.Signals)},
    "masked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "flags": list(sys.flags), "path": sys.path,
    "open": sorted(os.path.basename(os.readlink(f"/proc/self/fd/{n}")) for n in range(9) if os.path.exists(
        f"/proc/self/fd/{n}")),
    "threads": threading.active_count(), "main thread": threading.current_thread() is threading.main_thread(),
}))
if os.environ["ENDING"] == "raises":
    raise ValueError("it was told to")
if os.environ["ENDING"] == "exits":
    sys.exit(7)
if os.environ["ENDING"] == "at once":
    sys.stdout.flush()
    os._exit(9)
"""

SERVER_FRAME = '  File "<string>", line 1, in <module>\n'


@pytest.mark.parametrize("ending", ["ends", "raises", "exits", "at once"])
def test_forked_rank_equals_one_in_its_own_interpreter(tmp_path: Path, ending: str) -> None:
    found = []
    for fresh in (True, False):
        program = RankProgram(tmp_path, SCRIPT, 1, ("one", "two"), fresh=fresh, ENDING=ending)
        found.append([(one.code, one.output.replace(SERVER_FRAME, "")) for one in program.ended(60)])
    alone, forked = found
    assert forked == alone
    assert all(("torn down" in output, "at exit" in output) == (2 * (ending != "at once",)) for _, output in forked)


def test_signal_ends_a_forked_rank_and_its_group(tmp_path: Path) -> None:
    script = (
        "import subprocess, time\nprint('CHILD', subprocess.Popen(['sleep', '60']).pid, flush=True)\ntime.sleep(60)"
    )
    program = RankProgram(tmp_path, script, 2)
    try:
        for rank in range(2):
            program.said(rank, "CHILD")
        program.processes[0].send_signal(signal.SIGTERM)
        assert program.processes[0].wait(10) == -signal.SIGTERM
        assert program.processes[1].poll() is None
    finally:
        program.kill()
    assert program.processes[1].poll() == -signal.SIGKILL
    child = int(program.ended()[1].output.split()[1])
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}/stat").exists() and ") Z " not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < deadline, "the group is killed, and not the rank alone"
        time.sleep(0.02)
