"""Programs of several processes on the CPU: started together, waited for, and ended whatever happens.

They are forked from a process that has imported PyTorch and Encore: see `rank_server`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rank_server
from fixtures.fake_runs import default_signals
from host_gpu import HAS_GPU

ROOT = Path(__file__).resolve().parents[2]
COMMON = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
"""Variables of all ranks, and of what they are forked from."""


class Server:
    """The process that ranks are forked from. It ends with this object, and with this process."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", rank_server.COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**variables, **COMMON},
            start_new_session=True,
            preexec_fn=default_signals,  # under nohup or in the background an interrupt would be ignored
        )
        weakref.finalize(self, _end, self._process)
        assert self._reply() == rank_server.READY

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def _end(process: subprocess.Popen[bytes]) -> None:
    with process:
        assert process.stdin is not None
        process.stdin.close()


_servers: dict[frozenset[tuple[str, str]], Server] = {}
"""At most one, by the variables that it was started with: what it imported may have read them."""


def current_server() -> Server:
    """The one whose modules were imported with the variables that there are now."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    key = frozenset(variables.items())
    if key not in _servers:
        _servers.clear()
        _servers[key] = Server(variables)
    return _servers[key]


class ForkedProcess:
    """Control a program that the server has forked, as `subprocess.Popen` controls a child."""

    def __init__(
        self, server: Server, path: Path, arguments: Sequence[str], log: Path, variables: Mapping[str, str]
    ) -> None:
        self._server = server
        self.returncode: int | None = None
        self.pid: int = server.ask(
            path=str(path), arguments=arguments, log=str(log), folder=str(Path.cwd()), variables=variables
        )

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # until the server has reaped it, no other process can have its number
            os.kill(self.pid, number)


@dataclass(frozen=True)
class Ended:
    """Return how a rank ended: its exit code (negative: the signal), what it printed, and seconds from `start`."""

    code: int
    output: str
    seconds: float


class RankProgram:
    """The processes of one script; `script.py ARGUMENTS` with the variables that `torch.distributed` reads.

    `fresh`: in interpreters of their own, for programs that ask what is imported, or with variables that are read by
    what a server has imported.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        ranks: int,
        arguments: Sequence[str] = (),
        fresh: bool = False,
        **variables: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "program.py"
        path.write_text(script)
        # Where there is a GPU, what is imported may ask the driver, which no fork can use after that.
        server = None if fresh or HAS_GPU else current_server()
        self._started = time.monotonic()
        self._logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
        self.processes: list[ForkedProcess | subprocess.Popen[bytes]] = []
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
            if server is not None:
                self.processes.append(ForkedProcess(server, path, arguments, log, env))
            else:
                self.processes.append(_fresh_process(path, arguments, log, env))

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


def _fresh_process(
    path: Path, arguments: Sequence[str], log: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-P", str(path), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
            preexec_fn=default_signals,
        )


def run_ranks(folder: Path, script: str, ranks: int = 2, within_s: float = 200.0, **variables: str) -> list[str]:
    """Return what each rank printed; all must end with 0."""
    ended = RankProgram(folder, script, ranks, **variables).ended(within_s)
    for rank, one in enumerate(ended):
        assert one.code == 0, f"rank {rank} ended with {one.code}:\n{one.output[-3000:]}"
    return [one.output for one in ended]
