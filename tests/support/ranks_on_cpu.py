"""Programs of several processes on the CPU: started together, waited for, and ended whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


class Logged:
    """A process in a session of its own, with its output in a file."""

    def __init__(self, command: Sequence[str], log: Path, variables: Mapping[str, str], **options: Any) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,
                preexec_fn=default_signals,  # under nohup or in the background an interrupt would be ignored
                **options,
            )

    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def said(self, text: str, times: int = 1, within_s: float = 150.0) -> None:
        """Wait until it has printed this so many times."""
        deadline = time.monotonic() + within_s
        while (output := self.text()).count(text) < times:
            ended = self.process.poll() is not None and self.text().count(text) < times
            assert not ended and time.monotonic() < deadline, f"it never said {text!r}: {output[-3000:]}"
            time.sleep(0.02)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class RankProgram:
    """The processes of one script, with the variables that `torch.distributed` reads."""

    def __init__(self, folder: Path, script: str, ranks: int, **variables: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "program.py"
        path.write_text(script)
        common = {**COMMON, "WORLD_SIZE": str(ranks), "RENDEZVOUS": str(folder / "rendezvous"), **variables}
        self.ranks = [
            Logged(
                [sys.executable, "-P", str(path)],
                folder / f"rank{rank}.log",
                {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]

    def ended(self, within_s: float = 120.0) -> list[Ended]:
        """Wait for all; one that does not end is killed, and has the code of that."""
        deadline = time.monotonic() + within_s
        try:
            for one in self.ranks:
                one.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
        return [Ended(one.process.wait(), one.text()) for one in self.ranks]

    def kill(self) -> None:
        for one in self.ranks:
            one.kill()


def run_ranks(folder: Path, script: str, ranks: int = 2, within_s: float = 200.0, **variables: str) -> list[str]:
    """Return what each rank printed; all must end with 0."""
    ended = RankProgram(folder, script, ranks, **variables).ended(within_s)
    for rank, one in enumerate(ended):
        assert one.code == 0, f"rank {rank} ended with {one.code}:\n{one.output[-3000:]}"
    return [one.output for one in ended]
