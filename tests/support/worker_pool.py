"""Worker processes that take jobs one at a time; one that crashes or hangs costs its job and is replaced.

Workers read and write lines of JSON: `serve` is their side, `Pool` the other one. A worker says which part of a job
begins, so that a crash is counted against that part. What comes before any part is "eager".
"""

from __future__ import annotations

import collections
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from json_worker import ROOT, JsonWorker, NoAnswer, Say, channel

START_S = 180.0
"""The longest time until a worker is ready."""

FAILED_STARTS = 3
"""Workers that may end before they are ready, one after another, before no more are started."""

GONE = 17
"""Exit code of a worker that lost its device."""

Job = tuple[str, tuple[str, ...]]
"""The subject of a job, and its parts, such as compilers."""

Row = dict[str, Any]


class DeviceGone(Exception):
    """The device can no longer be used by this process."""


def serve(
    prepare: Callable[[], Any], rows: Callable[[str, Sequence[str], Say], Iterable[Row]], after: Callable[[], Any]
) -> int:
    """Answer each job with its rows, until there are no more or the device is gone. Return the exit code."""
    say = channel()
    prepare()
    say({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        try:
            for row in rows(job["task"], job["parts"], say):
                say({"row": row})
        except DeviceGone as error:
            say({"gone": str(error)})
            return GONE
        say({"done": True})
        after()
    return 0


class Pool:
    """Runs jobs in `size` processes until there are none left or the time is over. `tell` gets each row.

    `tell` may add jobs. `once`: each process has one job.
    """

    def __init__(
        self,
        command: Sequence[str],
        jobs: Iterable[Job],
        tell: Callable[[Row], None],
        *,
        size: int,
        log: Path,
        timeout_s: float,
        deadline: float | None = None,
        environment: Mapping[str, str] | None = None,
        once: bool = False,
    ) -> None:
        self.jobs = collections.deque(jobs)
        self.failed_starts = 0
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._environment = {**(environment or {}), "PYTHONPATH": path}
        self._command = (sys.executable, *command)
        self._size, self._log, self._once = size, log, once
        self._timeout_s, self._deadline = timeout_s, deadline
        self._lock = threading.RLock()
        self._told = tell
        self._stopped = False
        self._alive: set[JsonWorker] = set()
        self._working = 0

    def run(self) -> None:
        """Return when all is done, or at the deadline; what was not finished then is left out."""
        with ThreadPoolExecutor(self._size) as threads:
            try:
                left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
                for thread in wait([threads.submit(self._serve) for _ in range(self._size)], left).done:
                    thread.result()
            finally:
                with self._lock:
                    self._stopped = True
                    for worker in self._alive:
                        worker.kill()

    def _serve(self) -> None:
        while self.failed_starts < FAILED_STARTS and (job := self._next()) is not None:
            self._work(job)

    def _next(self) -> Job | None:
        """Return a job, or None if there are no more. Wait while a job at work may add others."""
        while not self._stopped:
            with self._lock:
                if self.jobs:
                    self._working += 1
                    return self.jobs.popleft()
                if not self._working:
                    break
            time.sleep(0.05)
        return None

    def _put_back(self, job: Job) -> None:
        with self._lock:
            self.jobs.appendleft(job)
            self._working -= 1

    def _work(self, job: Job | None) -> None:
        """Start a process for a job, and give it others until it ends."""
        with self._lock:
            if self._stopped:
                return
            worker = JsonWorker(self._command, self._log, self._environment)
            self._alive.add(worker)
        try:
            worker.answer(START_S)
            self.failed_starts = 0
            while job is not None and self._is_done(worker, job):
                job = None if self._once else self._next()
        except NoAnswer:
            self.failed_starts += 1
            self._put_back(job)
        finally:
            worker.kill()
            with self._lock:
                self._alive.discard(worker)

    def _is_done(self, worker: JsonWorker, job: Job) -> bool:
        """Let the worker do a job, and return whether it can take another one."""
        (task, parts), part, rows, alive = job, "eager", list[Row](), True
        try:
            worker.send({"task": task, "parts": parts})
        except OSError:  # it ended after the job before
            self._put_back(job)
            return False
        try:
            while "done" not in (message := worker.answer(self._timeout_s)):
                if "gone" in message:
                    raise NoAnswer(message["gone"])
                part = message.get("begin", part)
                rows += [message["row"]] if "row" in message else []
        except NoAnswer as error:
            alive = False
            rows.append(_crash(task, part, str(error)))
        with self._lock:
            if self._stopped:
                return False
            rest = parts[parts.index(part) + 1 :] if part in parts and not alive else ()
            if rest:
                self.jobs.appendleft((task, tuple(rest)))
            for row in rows:
                self._told(row)
            self._working -= 1
        return alive


def _crash(task: str, part: str, why: str) -> Row:
    if part == "eager":
        return {"task": task, "compiler": part, "skipped": f"eager ends the process: {why}"}
    ended = f"the process ended: {why}"
    return {"task": task, "compiler": part, "passed": False, "replays": 0, "crashed": True, "wrong": ended}
