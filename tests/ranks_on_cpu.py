"""Programs of several processes on the CPU: started together, waited for, and ended whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fixtures.fake_runs import default_signals

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code (negative: the signal), what it printed, and seconds from `start`."""

    code: int
    output: str
    seconds: float


class RankProgram:
    """The processes of one script; `script.py ARGUMENTS` with the variables that `torch.distributed` reads."""

    def __init__(self, folder: Path, script: str, ranks: int, arguments: Sequence[str] = (), **variables: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "program.py"
        path.write_text(script)
        self._started = time.monotonic()
        self._logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
        self.processes = []
        for rank, log in enumerate(self._logs):
            env = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "RENDEZVOUS": str(folder / "rendezvous"),
                **variables,
            }
            with log.open("wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-P", str(path), *arguments],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=env,
                        start_new_session=True,
                        preexec_fn=default_signals,  # under nohup or in the background an interrupt would be ignored
                    )
                )

    def said(self, rank: int, text: str, within_s: float = 120.0) -> None:
        """Waits until a rank has printed this."""
        deadline = time.monotonic() + within_s
        while text not in self._logs[rank].read_text(errors="replace"):
            assert time.monotonic() < deadline, (
                f"rank {rank} never said {text!r}: {self._logs[rank].read_text()[-2000:]}"
            )
            assert self.processes[rank].poll() is None or text in self._logs[rank].read_text(), self._tail(rank)
            time.sleep(0.02)

    def ended(self, within_s: float = 120.0) -> list[Ended]:
        """Waits for all; one that does not end is killed, and has the code of that."""
        deadline = time.monotonic() + within_s
        done: list[Ended] = []
        try:
            for process in self.processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
        for rank, process in enumerate(self.processes):
            done.append(Ended(process.wait(), self._logs[rank].read_text(errors="replace"), self._seconds()))
        return done

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _tail(self, rank: int) -> str:
        return self._logs[rank].read_text(errors="replace")[-3000:]


def run_ranks(folder: Path, script: str, ranks: int = 2, within_s: float = 200.0, **variables: str) -> list[str]:
    """What each rank printed; all must end with 0."""
    ended = RankProgram(folder, script, ranks, **variables).ended(within_s)
    for rank, one in enumerate(ended):
        assert one.code == 0, f"rank {rank} ended with {one.code}:\n{one.output[-3000:]}"
    return [one.output for one in ended]
