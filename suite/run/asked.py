"""Ask processes of their own: each gets a question on its command line, and answers with a record in a file.

What such a process does to PyTorch, and how it fails, does not affect the caller.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import select
import signal
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from suite.results.schema import Record
from suite.results.store import write_atomically
from suite.run.supervise import Supervised, TemporaryFolder, end
from suite.worker.main import end_with_parent

IDLE_S = 120.0
"""Time without any use of the processor after which a process counts as hanging, or `timeout_s` where that is less."""
SAY_S = 10.0
"""Time between two progress lines of a question."""
BEAT_S = 0.5
"""Time between two checks of the processes' processor time."""

Q = TypeVar("Q")
R = TypeVar("R", bound=Record)


def ask(
    command: Sequence[str],
    questions: Sequence[Q],
    kind: type[R],
    *,
    jobs: int = 1,
    timeout_s: float,
    say: Callable[[Q, float], None],
    no_gpu: bool = False,
) -> Generator[tuple[Q, R | str], None, None]:
    """Ask each question in a process, `jobs` at a time, and yield it with its answer once that is there.

    An answer that is a text says how the process ended without one, with the end of its log. Closing the iterator ends
    running processes.

    Args:
        command: what runs; it calls `answer`.
        questions: dataclasses.
        kind: the record of an answer.
        timeout_s: how long each may take.
        say: called with a question and its seconds so far, every ten seconds.
        no_gpu: hide GPUs, and let no threads compete, so that results are the same on every machine. The limit is then
            processor time, which depends little on the speed and load of the machine.
    """
    waiting: list[Q] = list(questions)
    running: list[_Running[Q]] = []
    with TemporaryFolder() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    own = Path(folder, str(len(waiting)))
                    running.append(_Running(command, waiting.pop(0), own, timeout_s, no_gpu))
                select.select([one.worker.exit_fd for one in running], (), (), BEAT_S)
                for one in running:
                    if (now := monotonic()) - one.said_at >= SAY_S:
                        one.said_at = now
                        say(one.question, now - one.begun_at)
                for one in [one for one in running if one.worker.exited() or one.has_taken_too_long()]:
                    running.remove(one)
                    yield one.question, one.finish(kind)
        finally:
            end([one.worker for one in running])


class _Running(Generic[Q]):
    """Hold a question with its process, from the start."""

    def __init__(self, command: Sequence[str], question: Q, folder: Path, timeout_s: float, no_gpu: bool) -> None:
        folder.mkdir()
        self.question = question
        self.begun_at = self.said_at = self._cpu_used_at = monotonic()
        self._timeout_s, self._limits_cpu = timeout_s, no_gpu
        self._cpu_s = 0.0
        self._answer = folder / "answer.json"
        text = TypeAdapter[Any](type(question)).dump_json(question).decode()
        env = {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
        }
        self.worker = Supervised((*command, text, str(self._answer)), folder / "log.txt", env=env if no_gpu else None)

    def has_taken_too_long(self) -> bool:
        """Return whether the process has exceeded its time, or has used no processor for so long that it hangs."""
        now = monotonic()
        if not self._limits_cpu:  # it may use many threads, or wait for a download or the GPU
            return now - self.begun_at >= self._timeout_s
        used = self.worker.cpu_seconds()
        if used >= self._cpu_s + 0.05:
            self._cpu_s, self._cpu_used_at = used, now
        return used >= self._timeout_s or now - self._cpu_used_at >= min(self._timeout_s, IDLE_S)

    def finish(self, kind: type[R]) -> R | str:
        """Return the answer, or why there is none, after the process has ended or taken too long; clean up after it."""
        try:
            if self.worker.exited():
                with suppress(FileNotFoundError, ValidationError):
                    return kind.model_validate_json(self._answer.read_bytes())
                what = self.worker.exit_description()
            else:
                self.worker.write_tracebacks()
                what = f"took longer than {self._timeout_s:g} s"
                if self._limits_cpu:
                    idle = f"used no processor time for {min(self._timeout_s, IDLE_S):g} s"
                    what = f"{what} of processor time" if self._cpu_s >= self._timeout_s else idle
            return f"{what}\n{self.worker.log_tail()}".strip()
        finally:
            end([self.worker])


def answer(question: type[Q], respond: Callable[[Q], Record]) -> None:
    """Answer the question on the command line, as the process that `ask` starts; end if the caller does.

    What is printed meanwhile is log.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("question", help="as JSON")
    parser.add_argument("answer", type=Path, help="the file to write")
    options = parser.parse_args()
    end_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    found = respond(TypeAdapter[Any](question).validate_json(options.question))
    write_atomically(options.answer, found.model_dump_json().encode())
