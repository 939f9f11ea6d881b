"""Worker processes that judge samples one at a time; one that crashes or hangs costs its sample and is replaced."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_S = 180.0
"""The longest time until a worker is ready."""

FAILED_STARTS = 3
"""Workers that may end before they are ready, one after another, before no more are started."""

Job = tuple[str, tuple[str, ...]]
"""A sample's key, and the compilers that are to run it."""

Say = Callable[[dict[str, Any]], None]


def channel_to_pool() -> Say:
    """Return a function by which a worker sends messages to its pool. Whatever else it prints goes to the log."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    return say


class Pool:
    """Runs jobs in `size` processes until there are none left or the time is over. `tell` gets each row."""

    def __init__(
        self,
        jobs: Iterable[Job],
        device: str,
        size: int,
        deadline: float,
        timeout_s: float,
        log: Path,
        tell: Callable[[dict[str, Any]], None],
        environment: Mapping[str, str],
        worker: Sequence[str] = ("-P", "-m", "tests.judges.worker"),
    ) -> None:
        self.jobs = collections.deque(jobs)
        self.device = device
        self.size = size
        self.deadline = deadline
        self.timeout_s = timeout_s
        self.tell = tell
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.environment = {**os.environ, **environment, "PYTHONPATH": path}
        self.worker = (sys.executable, *worker)
        self.failed_starts = 0
        self._lock = threading.Lock()
        self._log = log
        self._stopped = threading.Event()
        self._alive: set[subprocess.Popen[str]] = set()

    def run(self) -> None:
        """Return when all is done, or at the deadline; what was not finished then is left out."""
        threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(min(self.size, len(self.jobs)))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join(max(0.0, self.deadline - time.monotonic()))
        finally:
            self.stop()
            for thread in threads:
                thread.join(10)

    def stop(self) -> None:
        """End all processes."""
        self._stopped.set()
        with self._lock:
            for process in self._alive:
                process.kill()

    def _serve(self) -> None:
        with self._log.open("a", encoding="utf-8") as log:
            while not self._stopped.is_set() and self.jobs and self.failed_starts < FAILED_STARTS:
                self._work(log)

    def _work(self, log: Any) -> None:
        """Start a process and give it jobs until it ends."""
        with self._lock:
            if self._stopped.is_set():
                return
            process = subprocess.Popen(
                [*self.worker, self.device],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            self._alive.add(process)
        try:
            ready, _ = self._read(process, START_S)
            if ready is None:
                self.failed_starts += not self._stopped.is_set()
                return
            self.failed_starts = 0
            while not self._stopped.is_set():
                try:
                    job = self.jobs.popleft()
                except IndexError:
                    return
                if not self._judge(process, job):
                    return
        finally:
            process.kill()
            process.wait()
            with self._lock:
                self._alive.discard(process)

    def _judge(self, process: subprocess.Popen[str], job: Job) -> bool:
        """Return whether the process can take another job."""
        key, compilers = job
        assert process.stdin
        try:
            process.stdin.write(json.dumps({"task": key, "compilers": compilers}) + "\n")
            process.stdin.flush()
        except OSError:
            self.jobs.append(job)
            return False
        rows: list[dict[str, Any]] = []
        current = "eager"
        while True:
            message, timed_out = self._read(process, self.timeout_s)
            if self._stopped.is_set() and message is None:
                return False
            if message is None or "gone" in message:
                ended = process.wait() if message is None else 0
                why = message["gone"] if message else "no answer in time" if timed_out else f"exit code {ended}"
                self._crashed(key, compilers, current, why, rows)
                return False
            if "begin" in message:
                current = message["begin"]
            elif "row" in message:
                rows.append(message["row"])
            elif "done" in message:
                self._tell(rows)
                return True

    def _crashed(self, key: str, compilers: Sequence[str], current: str, why: str, rows: list[dict[str, Any]]) -> None:
        if current == "eager":
            rows.append({"task": key, "compiler": "eager", "skipped": f"eager ends the process: {why}"})
        else:
            crash = {"task": key, "compiler": current, "passed": False, "replays": 0, "crashed": True}
            rows.append({**crash, "wrong": f"the process ended: {why}"})
            rest = tuple(compilers[compilers.index(current) + 1 :])
            if rest:
                self.jobs.appendleft((key, rest))
        self._tell(rows)

    def _tell(self, rows: Iterable[dict[str, Any]]) -> None:
        with self._lock:
            for row in rows:
                self.tell(row)

    def _read(self, process: subprocess.Popen[str], seconds: float) -> tuple[Any, bool]:
        """Return the next message, None if the process ended, and whether it was ended for taking too long."""
        assert process.stdout
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            line = process.stdout.readline()
        finally:
            timer.cancel()
        try:
            return (json.loads(line) if line else None), late.is_set()
        except ValueError:  # the process ended within a line
            return None, late.is_set()
