"""Programs of several processes on the CPU: started together, waited for, and ended whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fixtures.fake_runs import default_signals

ROOT = Path(__file__).resolve().parents[2]
COMMON = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
"""Variables of all ranks."""


@dataclass(frozen=True)
class Ended:
    """Hold how a rank ended: its exit code (negative: the signal), and what it printed."""

    code: int
    output: str


class RankProgram:
    """The processes of one script, with the variables that `torch.distributed` reads."""

    def __init__(self, folder: Path, script: str, ranks: int, **variables: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "program.py"
        path.write_text(script)
        self._logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate(self._logs):
            env = {
                **os.environ,
                **COMMON,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "RENDEZVOUS": str(folder / "rendezvous"),
                **variables,
            }
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-P", str(path)],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=env,
                    start_new_session=True,
                    preexec_fn=default_signals,  # under nohup or in the background an interrupt would be ignored
                )
            self.processes.append(process)

    def said(self, rank: int, text: str, within_s: float = 120.0) -> None:
        """Wait until a rank has printed this."""
        deadline = time.monotonic() + within_s
        while text not in (output := self._output(rank)):
            ended = self.processes[rank].poll() is not None and text not in self._output(rank)
            assert not ended and time.monotonic() < deadline, f"rank {rank} never said {text!r}: {output[-3000:]}"
            time.sleep(0.02)

    def ended(self, within_s: float = 120.0) -> list[Ended]:
        """Wait for all; one that does not end is killed, and has the code of that."""
        deadline = time.monotonic() + within_s
        try:
            for process in self.processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
        return [Ended(process.wait(), self._output(rank)) for rank, process in enumerate(self.processes)]

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _output(self, rank: int) -> str:
        return self._logs[rank].read_text(errors="replace")


def run_ranks(folder: Path, script: str, ranks: int = 2, within_s: float = 200.0, **variables: str) -> list[str]:
    """Return what each rank printed; all must end with 0."""
    ended = RankProgram(folder, script, ranks, **variables).ended(within_s)
    for rank, one in enumerate(ended):
        assert one.code == 0, f"rank {rank} ended with {one.code}:\n{one.output[-3000:]}"
    return [one.output for one in ended]
