"""Explaining targets, each in a process of its own, so that nothing they do or fail at touches the caller.

The caller imports no torch through this module. A worker that crashes, hangs or is killed gives an explanation with
`error` set, and the others go on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from pydantic import ValidationError

from models import registry
from models.registry import Size
from optimizations.atomic_file import write_atomically
from suite.errors import WrongUse
from suite.explain.records import Answer, Explanation
from suite.explain.targets import Target, find_targets, unexplained

WORKER_COMMAND = (sys.executable, "-P", "-m", "suite.explain.worker")
"""`-P` keeps a folder named `suite` in the user's working directory from being taken for ours."""
TIMEOUT_S = 900.0
LOG_TAIL_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Explained:
    """One target done. `path` is the file it was written to, if there is one; `seconds` its wall time."""

    target: Target
    explanation: Explanation
    path: Path | None
    seconds: float
    done: int
    total: int


def explain_target(
    name: str, *, variant: str | None = None, size: Size = "full", timeout_s: float = TIMEOUT_S
) -> Explanation:
    """Explain a workload, or a program given as `module:callable`.

    A failure of the analysis is in the explanation's `error`.

    Raises:
        WrongUse: there is no such workload, variant or program.
    """
    targets = find_targets([name], variant=variant, size=size)
    return next(explain_many(targets, timeout_s=timeout_s)).explanation


def explain_many(
    targets: Sequence[Target], *, out: Path | None = None, jobs: int | None = None, timeout_s: float = TIMEOUT_S
) -> Generator[Explained, None, None]:
    """Explain targets, `jobs` at a time (as many as there are cores by default), yielding each when it is done.

    With `out`, each is written to `<name>.json` there at once (`<name>-<variant>.json` for a variant that is not the
    workload's default). Closing the iterator ends what still runs.

    Raises:
        WrongUse: a program is none, or `out` is no folder and cannot be made one.
    """
    if out is not None:
        _make_folder(out)
    running = _Running()
    workers = ThreadPoolExecutor(max_workers=jobs or _cores())
    try:
        started: dict[Future[tuple[Explanation, float]], Target] = {
            workers.submit(_explain, target, timeout_s, running): target for target in targets
        }
        for done, future in enumerate(as_completed(started), start=1):
            explanation, seconds = future.result()
            target = started[future]
            path = None if out is None else out / file_name(target)
            if path is not None:
                write_atomically(path, explanation.model_dump_json(indent=1).encode() + b"\n")
            yield Explained(target, explanation, path, seconds, done, len(targets))
    finally:
        workers.shutdown(wait=False, cancel_futures=True)
        running.end()
        workers.shutdown(wait=True)


def file_name(target: Target) -> str:
    """The file a target's explanation goes to."""
    stem = target.name.replace(":", ".")
    is_default = target.variant is None or target.variant == registry.find(target.name).variants[0]
    return f"{stem}.json" if is_default else f"{stem}-{target.variant}.json"


class _Running:
    """The workers that run now, so that they can be ended from another thread. None is started after `end`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes] | None:
        with self._lock, log.open("wb") as output:
            if self._ended:
                return None
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # The same answers on every machine: a GPU that is there is hidden, and threads do not compete.
                env={
                    **os.environ,
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": "1",
                    "TORCHINDUCTOR_CACHE_DIR": str(log.parent / "inductor"),
                    "TRITON_CACHE_DIR": str(log.parent / "triton"),
                },
            )
            self._processes.add(process)
            return process

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Ends a worker with whatever it started."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with self._lock:
            self._processes.discard(process)

    def end(self) -> None:
        with self._lock:
            self._ended = True
            processes = list(self._processes)
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _explain(target: Target, timeout_s: float, running: _Running) -> tuple[Explanation, float]:
    start = monotonic()
    with tempfile.TemporaryDirectory(prefix="encore-explain-") as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log.txt")
        variant = () if target.variant is None else ("--variant", target.variant)
        command = (*WORKER_COMMAND, "--target", target.name, *variant, "--size", target.size, "--answer", str(answer))
        process = running.start(command, log)
        if process is None:
            return _failed(target, "was not started"), 0.0
        try:
            process.wait(timeout_s)
            explanation = _read(answer, target, process.returncode, log)
        except subprocess.TimeoutExpired:
            explanation = _failed(target, f"the analysis took longer than {timeout_s:g} s", log)
        finally:
            running.stop(process)
        return explanation, monotonic() - start


def _read(answer: Path, target: Target, exit_code: int, log: Path) -> Explanation:
    try:
        read = Answer.model_validate_json(answer.read_bytes())
    except (FileNotFoundError, ValidationError):
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
        return _failed(target, f"the analysis {how}", log)
    if read.wrong_use is not None:
        raise WrongUse(read.wrong_use)
    return read.explanation or _failed(target, "the analysis gave no answer", log)


def _failed(target: Target, what: str, log: Path | None = None) -> Explanation:
    tail = log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:].strip() if log is not None else ""
    return unexplained(target, f"{what}\n{tail}".strip())


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise WrongUse(f"--out {out}: a file of that name is in the way; give a folder") from error


def _cores() -> int:
    return max(1, len(os.sched_getaffinity(0)))
