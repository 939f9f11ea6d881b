"""Runs programs in modes, each pair in a process of its own, and gives a row for each.

Programs come in waves. The processes of a wave compile and are compared several at a time; when all of them wait, their
programs are timed one after another, its modes alternately, with nothing else on the GPU. Encore starts when
stock is through with the same program, and they share a folder of compiled kernels: kernels are tuned once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from real_programs.compare import difference
from real_programs.record import Program
from real_programs.rows import BASE, STOCK, judged
from suite.measure.environment import without_paths
from tests.support.json_worker import JsonWorker, NoAnswer

SOURCES = Path(__file__).resolve().parents[1]
ALIVE = 14
"""Programs that are timed together."""
TURNS = 9
TURN_S, TINY_TURN_S = 0.12, 0.05
"""Time for a mode's turn."""
SLOW_TURN_S = 2.0
"""A mode whose turn took longer has no second one."""
TIMING_S = 7.0
"""About the time to time one program. A wave reserves it in its budget."""
SETTLE_S = 4.8
"""Most time for Encore to have nothing pending."""
ANSWER_S, END_S = 120.0, 60.0
"""Most time for one answer, and for the last one."""
OUT_OF_TIME = "the budget ran out"
LOG_BYTES = 3000
WORKER = (sys.executable, "-m", "real_programs.worker")
VARIABLES = {
    # A pool of compiler processes in each of many processes would be too many for any machine.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Process:
    """A worker and what it said. `failure`: the status that its row has, and why; nothing is asked after it."""

    def __init__(self, program: Program, mode: str, folder: Path) -> None:
        self.program, self.mode = program, mode
        self.results = folder / f"{program.name}.{mode}.safetensors"
        self.said: dict[str, Any] = {}
        self.turns: list[list[list[float]]] = []
        self.failure: tuple[str, str] | None = None
        self._log = folder / f"{program.name}.{mode}.log"
        self._worker: JsonWorker | None = None

    def start(self, device: str, size: str, cache: Path, command: Sequence[str] = WORKER) -> None:
        path = [str(SOURCES), str(SOURCES.parents[1]), os.environ.get("PYTHONPATH")]
        folders = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        environment = {
            **VARIABLES,
            **{name: str(cache / self.program.name / folder) for name, folder in folders.items()},
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        }
        arguments = (self.program.name, self.mode, device, size, str(self.results))
        self._worker = JsonWorker([*command, *arguments], self._log, environment)

    def ask(self, wanted: str, timeout_s: float, command: Mapping[str, Any] | None = None) -> None:
        """Send a command, if any, and keep the answer; note a failure."""
        if self.failure:
            return
        assert self._worker
        try:
            if command is not None:
                with contextlib.suppress(OSError):  # one that is gone is noticed when its answer is awaited
                    self._worker.send(command)
            answer = self._worker.answer(max(timeout_s, 0.1))
        except NoAnswer as error:
            what = f"no answer ({wanted}) within {timeout_s:.1f} s" if error.late else f"its process ended: {error}"
            self.failure = "timed_out" if error.late else "crashed", f"{what}; {self._tail()}"
        else:
            if wanted in answer:
                self.said |= answer
            else:
                status = "skipped" if "skipped" in answer else "error"
                self.failure = status, without_paths(str(answer.get(status, answer)))[:500]

    def time(self, seconds: float, timeout_s: float) -> None:
        """Let it have one turn."""
        self.ask("rounds", timeout_s, {"time": seconds})
        if not self.failure:
            self.turns.append(self.said["rounds"])

    def kill(self) -> None:
        """End the process in any state."""
        if self._worker is not None:
            self._worker.kill()

    def _tail(self) -> str:
        lines = self._log.read_bytes()[-LOG_BYTES:].decode(errors="replace").strip().splitlines()
        return f"last line of its log: {without_paths(lines[-1])[:300]!r}" if lines else "its log is empty"


Group = Mapping[str, Process]
"""The processes of a program, by mode."""


class Conductor:
    """`tell` is given each row when its program is through. `given` are the arguments of the script.

    `cache` has compiled kernels: all modes and processes of a program run the same.
    """

    def __init__(
        self,
        given: argparse.Namespace,
        common: Mapping[str, Any],
        tell: Callable[[dict[str, Any]], None],
        cache: Path,
        deadline: float,
    ) -> None:
        self._given, self._common, self._tell, self._cache, self._deadline = given, common, tell, cache, deadline
        self._starting = threading.Lock()
        self._stopped = False

    def run(self, programs: Sequence[Program]) -> None:
        with tempfile.TemporaryDirectory(prefix="encore-programs-") as folder:
            for first in range(0, len(programs), ALIVE):
                wave = programs[first : first + ALIVE]
                groups = [{mode: Process(one, mode, Path(folder)) for mode in self._given.modes} for one in wave]
                try:
                    self._prepare_all(groups)
                    for group in groups:
                        self._time(group)
                        for row in self._rows(group):
                            self._tell(row)
                finally:
                    for process in (process for group in groups for process in group.values()):
                        process.kill()

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _prepare_all(self, groups: Sequence[Group]) -> None:
        """Start all processes, several at a time, and wait until their calls that are compared are through."""
        pool = ThreadPoolExecutor(self._given.jobs)
        # Eager and stock of all programs first: Encore waits for them anyway.
        ordered = sorted((mode not in (BASE, STOCK), n, mode) for n in range(len(groups)) for mode in groups[n])
        started = dict[tuple[int, str], Future[None]]()
        try:
            for is_later, n, mode in ordered:
                stock = started.get((n, STOCK)) if is_later else None
                started[n, mode] = pool.submit(self._prepare, groups[n][mode], stock, TIMING_S * len(groups))
            for one in started.values():
                one.result()
        except BaseException:
            with self._starting:  # all that were started by now are ended
                self._stopped = True
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        text = f"{len(groups)} programs are compared; timing them ({self._left():.0f} s are left)"
        print(text, file=sys.stderr, flush=True)

    def _prepare(self, process: Process, stock: Future[None] | None, reserved_s: float) -> None:
        if stock is not None:
            with contextlib.suppress(CancelledError):
                stock.exception()
        left = self._left() - reserved_s
        with self._starting:
            if left <= 0 or self._stopped:
                process.failure = "not_run", "interrupted" if self._stopped else OUT_OF_TIME
            else:
                process.start(self._given.device, self._size, self._cache)
        process.ask("prepared", min(ANSWER_S, left))
        if process.failure:
            process.kill()

    @property
    def _size(self) -> str:
        return "tiny" if self._given.tiny else "full"

    def _time(self, group: Group) -> None:
        """Turns of all modes, then their last answers. A mode that fails leaves; the others go on."""
        slow: set[str] = set()
        seconds = TINY_TURN_S if self._given.tiny else TURN_S
        for process in group.values():
            if self._left() <= 0:
                process.failure = process.failure or ("not_run", f"compared, but not timed: {OUT_OF_TIME}")
            process.ask("settled", ANSWER_S, {"settle": SETTLE_S})
        for turn in range(TURNS):
            for mode in (one for one in group if one not in slow):
                begun = time.monotonic()
                group[mode].time(seconds if turn else seconds / 2, ANSWER_S)
                if time.monotonic() - begun > SLOW_TURN_S or self._left() <= 0:
                    slow.add(mode)
        for process in group.values():
            process.ask("ended", END_S, {"end": True})
            process.kill()

    def _rows(self, group: Group) -> Iterator[dict[str, Any]]:
        """Yield a row for each process, compared with eager's and stock's results."""
        rows: dict[str, dict[str, Any]] = {}
        for mode, process in group.items():
            row = rows[mode] = self._row(process)
            for key, reference in (("eager", group.get(BASE)), ("stock", group.get(STOCK))):
                if reference in (None, process) or process.failure or reference.failure:
                    continue
                found = difference(process.results, reference.results)
                row |= {f"error_over_{key}": found.error, f"bits_of_{key}": found.bits}
                row |= {"worst": found.where} if key == BASE else {}
        for mode, row in rows.items():
            yield row if mode in (BASE, STOCK) else judged(row, group[mode].program.tolerance, rows.get(STOCK))

    def _row(self, process: Process) -> dict[str, Any]:
        program = process.program
        row = {"program": program.name, "mode": process.mode, "family": program.family, "what": program.summary}
        row |= {"size": self._size, **self._common, "status": "ok", "reason": None, "verdict": None}
        if process.failure:
            return row | dict(zip(("status", "reason"), process.failure, strict=True))
        rounds = [times for turn in process.turns for times in turn]
        return row | {
            **{name: value for name, value in process.said.items() if name not in ("prepared", "rounds", "ended")},
            "calls_per_round": program.calls,
            "issue_us": 1e6 * statistics.median(issue for issue, _ in rounds),
            "whole_us": 1e6 * statistics.median(whole for _, whole in rounds),
            "turns_us": [1e6 * statistics.median(whole for _, whole in turn) for turn in process.turns],
        }
