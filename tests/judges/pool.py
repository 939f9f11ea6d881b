"""Worker processes that judge samples one at a time; one that crashes or hangs costs its sample and is replaced."""

from __future__ import annotations

import collections
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import JSON_WORKER

START_S = 180.0
"""The longest time until a worker is ready."""

FAILED_STARTS = 3
"""Workers that may end before they are ready, one after another, before no more are started."""

Job = tuple[str, tuple[str, ...]]
"""A sample's key, and the compilers that are to run it."""


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
        self.size = size
        self.deadline = deadline
        self.timeout_s = timeout_s
        self.tell = tell
        path = os.pathsep.join(filter(None, [str(JSON_WORKER.ROOT), os.environ.get("PYTHONPATH")]))
        self.environment = {**environment, "PYTHONPATH": path}
        self.command = (sys.executable, *worker, device)
        self.failed_starts = 0
        self._lock = threading.Lock()
        self._log = log
        self._stopped = threading.Event()
        self._alive: set[Any] = set()

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
            for worker in self._alive:
                worker.kill()

    def _serve(self) -> None:
        while not self._stopped.is_set() and self.jobs and self.failed_starts < FAILED_STARTS:
            self._work()

    def _work(self) -> None:
        """Start a process and give it jobs until it ends."""
        with self._lock:
            if self._stopped.is_set():
                return
            worker = JSON_WORKER.JsonWorker(self.command, self._log, self.environment)
            self._alive.add(worker)
        try:
            try:
                worker.answer(START_S)
            except JSON_WORKER.NoAnswer:
                self.failed_starts += not self._stopped.is_set()
                return
            self.failed_starts = 0
            while not self._stopped.is_set():
                try:
                    job = self.jobs.popleft()
                except IndexError:
                    return
                if not self._judge(worker, job):
                    return
        finally:
            worker.kill()
            with self._lock:
                self._alive.discard(worker)

    def _judge(self, worker: Any, job: Job) -> bool:
        """Return whether the process can take another job."""
        key, compilers = job
        try:
            worker.send({"task": key, "compilers": compilers})
        except OSError:
            self.jobs.append(job)
            return False
        rows: list[dict[str, Any]] = []
        current = "eager"
        while True:
            try:
                message = worker.answer(self.timeout_s)
            except JSON_WORKER.NoAnswer as error:
                if self._stopped.is_set():
                    return False
                message = {"gone": str(error)}
            if "gone" in message:
                self._crashed(key, compilers, current, message["gone"], rows)
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
