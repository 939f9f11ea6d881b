"""Runs programs in modes, each pair in a process of its own, and gives a row for each.

Programs come in waves. The processes of a wave compile and are compared several at a time; when all of them wait, their
programs are timed one after another, its modes alternately, with nothing else on the GPU. Encore starts when
stock is through with the same program, and they share a folder of compiled kernels: kernels are tuned once.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from real_programs.compare import difference
from real_programs.record import Program
from real_programs.rows import BASE, STOCK, judged
from suite.measure.environment import without_paths
from tests.support.json_worker import JsonWorker, NoAnswer

SOURCES = Path(__file__).resolve().parents[1]
REPOSITORY = SOURCES.parents[1]
TURNS = 9
SLOW_TURN_S = 2.0
"""A mode whose turn took longer has no second one."""
TIMING_S = 7.0
"""About the time to time one program. A wave reserves it in its budget."""
END_S = 60.0
OUT_OF_TIME = "the budget ran out"
LOG_BYTES = 3000
WORKER = (sys.executable, "-m", "real_programs.worker")


@dataclass(frozen=True)
class Plan:
    """Settings of a run. `jobs`: processes that compile at a time; `alive`: programs of a wave; times in seconds.

    `settle_s`: what a program may take until nothing is pending, which it does before its first turn.
    """

    modes: tuple[str, ...]
    device: str
    tiny: bool
    jobs: int
    alive: int
    timeout_s: float
    budget_s: float
    turn_s: float
    settle_s: float = 4.8
    worker: tuple[str, ...] = WORKER


class Ended(Exception):
    """A process that gave no answer; `status` is what its row says."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Process:
    """A worker and what it said. It ends with all that it started."""

    def __init__(self, program: Program, mode: str, plan: Plan, folder: Path, cache: Path) -> None:
        self.program, self.mode, self.plan = program, mode, plan
        self.results = folder / f"{program.name}.{mode}.safetensors"
        self.prepared: dict[str, Any] = {}
        self.rounds: list[list[list[float]]] = []
        self.ended: dict[str, Any] = {}
        self.failure: Ended | None = None
        self._log = folder / f"{program.name}.{mode}.log"
        self._cache = cache / program.name
        self._worker: JsonWorker | None = None

    def prepare(self, timeout_s: float, starting: threading.Lock, stopped: threading.Event) -> None:
        """Start, unless the run is `stopped`, and wait until the compared calls are through."""
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCES), str(REPOSITORY), os.environ.get("PYTHONPATH")])),
            "TORCHINDUCTOR_CACHE_DIR": str(self._cache / "inductor"),
            "TRITON_CACHE_DIR": str(self._cache / "triton"),
            # A pool of compiler processes in each of many processes would be too many for any machine.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "2",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        size = "tiny" if self.plan.tiny else "full"
        arguments = (self.program.name, self.mode, self.plan.device, size, str(self.results))
        with starting:  # all that were started when the run is stopped are ended
            if stopped.is_set():
                raise Ended("not_run", "interrupted")
            self._worker = JsonWorker([*self.plan.worker, *arguments], self._log, environment)
        self.prepared = self._answer("prepared", timeout_s)

    def time(self, seconds: float, timeout_s: float) -> None:
        """One turn."""
        self.rounds.append(self._answer("rounds", timeout_s, {"time": seconds})["rounds"])

    def settle(self, seconds: float, timeout_s: float) -> None:
        """Let it run on until nothing is pending, with nothing else on the GPU."""
        self.prepared |= self._answer("settled", timeout_s, {"settle": seconds})

    def attempt(self, act: Callable[[Process], None]) -> None:
        """Do something, unless it failed before. Note a failure."""
        if not self.failure:
            try:
                act(self)
            except Ended as failure:
                self.failure = failure

    def end(self) -> None:
        self.ended = self._answer("ended", END_S, {"end": True})

    def kill(self) -> None:
        """End the process in any state."""
        if self._worker is not None:
            self._worker.kill()

    def _answer(self, wanted: str, timeout_s: float, command: Mapping[str, Any] | None = None) -> dict[str, Any]:
        assert self._worker
        try:
            if command is not None:
                with contextlib.suppress(OSError):  # one that is gone is noticed when its answer is awaited
                    self._worker.send(command)
            answer = self._worker.answer(max(timeout_s, 0.1))
        except NoAnswer as error:
            if error.late:
                raise Ended("timed_out", f"no answer ({wanted}) within {timeout_s:.1f} s; {self._tail()}") from None
            raise Ended("crashed", f"its process ended: {error}; {self._tail()}") from None
        if wanted not in answer:
            status = "skipped" if "skipped" in answer else "error"
            raise Ended(status, without_paths(str(answer.get(status, answer)))[:500])
        return answer

    def _tail(self) -> str:
        try:
            lines = self._log.read_bytes()[-LOG_BYTES:].decode(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return f"last line of its log: {without_paths(lines[-1])[:300]!r}" if lines else "its log is empty"


@dataclass
class Conductor:
    """`tell` is given each row when its program is through, `say` each remark on progress.

    `cache` has compiled kernels: all modes and processes of a program run the same.
    """

    plan: Plan
    common: Mapping[str, Any]
    tell: Callable[[dict[str, Any]], None]
    say: Callable[[str], None]
    cache: Path
    _begun: float = field(default_factory=time.monotonic)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _starting: threading.Lock = field(default_factory=threading.Lock)

    def run(self, programs: Sequence[Program]) -> None:
        with tempfile.TemporaryDirectory(prefix="encore-programs-") as name:
            for first in range(0, len(programs), self.plan.alive):
                wave = programs[first : first + self.plan.alive]
                if self._left() <= 0:
                    for program in wave:
                        self._tell_not_run(program)
                    continue
                self._wave(wave, Path(name))

    def _left(self) -> float:
        return self.plan.budget_s - (time.monotonic() - self._begun)

    def _wave(self, wave: Sequence[Program], folder: Path) -> None:
        groups = [
            {mode: Process(program, mode, self.plan, folder, self.cache) for mode in self.plan.modes}
            for program in wave
        ]
        pool = ThreadPoolExecutor(self.plan.jobs)
        try:
            # Eager and stock of all programs first: Encore waits for them anyway.
            ordered = sorted((mode not in (BASE, STOCK), n, mode) for n in range(len(groups)) for mode in groups[n])
            reserved_s, started = TIMING_S * len(wave), dict[tuple[int, str], Future[None]]()
            for is_later, n, mode in ordered:
                stock = started.get((n, STOCK)) if is_later else None
                started[n, mode] = pool.submit(self._prepare, groups[n][mode], stock, reserved_s)
            for one in started.values():
                one.result()
            self.say(f"{len(wave)} programs are compared; timing them ({self._left():.0f} s are left)")
            for group in groups:
                self._time(group)
                for row in self._rows(group):
                    self.tell(row)
        except BaseException:
            with self._starting:
                self._stopped.set()
            raise
        finally:
            for process in [process for group in groups for process in group.values()]:
                process.kill()
            pool.shutdown(cancel_futures=True)

    def _prepare(self, process: Process, stock: Future[None] | None, reserved_s: float) -> None:
        if stock is not None:
            with contextlib.suppress(CancelledError):
                stock.exception()
        try:
            if self._left() <= reserved_s:
                raise Ended("not_run", OUT_OF_TIME)
            process.prepare(min(self.plan.timeout_s, self._left() - reserved_s), self._starting, self._stopped)
        except Ended as failure:
            process.failure = failure
            process.kill()

    def _time(self, group: Mapping[str, Process]) -> None:
        """Turns of all modes, then their last answers. A mode that fails leaves; the others go on."""
        slow: set[str] = set()
        if self._left() <= 0:
            for process in group.values():
                process.failure = process.failure or Ended("not_run", f"compared, but not timed: {OUT_OF_TIME}")
        for process in group.values():
            process.attempt(lambda one: one.settle(self.plan.settle_s, self.plan.timeout_s))
        for turn in range(TURNS):
            seconds = self.plan.turn_s if turn else self.plan.turn_s / 2
            for mode, process in group.items():
                if mode in slow:
                    continue
                begun = time.monotonic()
                process.attempt(lambda one: one.time(seconds, self.plan.timeout_s))  # noqa: B023, called at once
                if time.monotonic() - begun > SLOW_TURN_S or self._left() <= 0:
                    slow.add(mode)
        for process in group.values():
            process.attempt(Process.end)
            process.kill()

    def _rows(self, group: Mapping[str, Process]) -> list[dict[str, Any]]:
        base, stock, rows = group.get(BASE), group.get(STOCK), {}
        for mode, process in group.items():
            row = self._row(process)
            if row["status"] == "ok":
                for key, reference in (("eager", base), ("stock", stock)):
                    if reference and reference is not process and not reference.failure:
                        self._compare(row, key, process, reference)
            rows[mode] = row
        return [
            row if mode in (BASE, STOCK) else judged(row, group[mode].program.tolerance, rows.get(STOCK))
            for mode, row in rows.items()
        ]

    def _row(self, process: Process) -> dict[str, Any]:
        program = process.program
        row: dict[str, Any] = {
            "program": program.name,
            "mode": process.mode,
            "family": program.family,
            "what": program.summary,
            "size": "tiny" if self.plan.tiny else "full",
            **self.common,
            "status": "ok",
            "reason": None,
            "verdict": None,
        }
        if process.failure:
            return {**row, "status": process.failure.status, "reason": str(process.failure)}
        rounds = [times for turn in process.rounds for times in turn]
        return {
            **row,
            "device": process.prepared["device"],
            "first_rounds_s": process.prepared["first_rounds_s"],
            "settled": process.prepared["settled"],
            "rounds_before_timing": process.prepared["rounds"],
            "calls_per_round": program.calls,
            "issue_us": 1e6 * statistics.median(issue for issue, _ in rounds),
            "whole_us": 1e6 * statistics.median(whole for _, whole in rounds),
            "turns_us": [1e6 * statistics.median(whole for _, whole in turn) for turn in process.rounds],
            **{key: value for key, value in process.ended.items() if key != "ended"},
        }

    def _compare(self, row: dict[str, Any], key: str, process: Process, reference: Process) -> None:
        found = difference(process.results, reference.results)
        row[f"error_over_{key}"] = found.error
        row[f"bits_of_{key}"] = found.bits
        if key == BASE:
            row["worst"] = found.where

    def _tell_not_run(self, program: Program) -> None:
        for mode in self.plan.modes:
            process = Process(program, mode, self.plan, Path(), self.cache)
            process.failure = Ended("not_run", OUT_OF_TIME)
            self.tell(self._row(process))
