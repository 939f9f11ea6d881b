"""Run one cell in a process: read commands from one pipe, answer on another (`suite.worker.protocol`).

This module does not import torch before the first command, which sets torch's environment variables. Output of
libraries goes to stdout and stderr, which are the log; messages use a separate pipe.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

from suite.results.schema import Record, Status
from suite.worker.compile_cache import INDUCTOR, TRITON
from suite.worker.protocol import (
    COMMANDS,
    CellError,
    CellSpec,
    Collect,
    Collected,
    Compile,
    Done,
    Failed,
    Inaccurate,
    Measure,
    Measured,
    Phase,
    Prepare,
    Settle,
    Start,
    Stop,
    encode,
)

if TYPE_CHECKING:
    from suite.worker.live_cell import LiveCell

_STATUS_OF_PHASE = {"build": Status.MODEL_FAIL_TO_LOAD, "compile": Status.COMPILE_ERROR}
"""The status of an exception, by phase; in other phases it is `run_error`."""


def main(arguments: list[str] | None = None) -> int:
    """Execute a runner's commands until `stop`, the end of the pipe, or a failure; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m suite.worker.main", description=__doc__)
    parser.add_argument("--read", type=int, required=True, metavar="FD", help="pipe that commands come from")
    parser.add_argument("--write", type=int, required=True, metavar="FD", help="pipe that answers go to")
    options = parser.parse_args(arguments)
    for descriptor in (options.read, options.write):
        os.set_inheritable(descriptor, False)  # a remaining compile worker must not keep the pipes open
    faulthandler.register(signal.SIGUSR1)  # the runner's signal when a phase takes too long
    end_with_parent()
    with os.fdopen(options.read, "rb") as commands, os.fdopen(options.write, "wb", buffering=0) as replies:
        server = Server(commands, replies)
        code = server.serve()
    if server.leaves_at_once:
        _leave(code)
    return code


class Server:
    """Execute the commands of one runner in order. `leaves_at_once`: end the process without clean-up, see `_leave`."""

    def __init__(self, commands: IO[bytes], replies: IO[bytes]) -> None:
        self._commands = commands
        self._replies = replies
        self._phase = "build"
        self._cell: LiveCell | None = None
        self.leaves_at_once = False
        self._started = False

    def serve(self) -> int:
        try:
            for answer in self._answers():
                self._send(answer)
        except BrokenPipeError:
            return 1
        except (Exception, SystemExit) as error:  # whatever ends a cell becomes a status; the traceback is in the log
            traceback.print_exc()
            sys.stderr.flush()
            self._send(failure(error, self._phase))
            return 1
        return 0

    def _answers(self) -> Iterator[Record]:
        for line in self._commands:
            match COMMANDS.validate_json(line):
                case Start(spec=spec):
                    enter_environment(spec)
                    from suite.worker.live_cell import start

                    self._started = True
                    yield start(spec)
                case Prepare(spec=spec):
                    self.leaves_at_once = spec.device == "cuda" or (spec.tp or 1) > 1
                    if not self._started:
                        enter_environment(spec)
                    from suite.worker.live_cell import LiveCell

                    self._cell = LiveCell(spec, self._announce)
                    yield self._cell.build()
                case Compile(conditions=conditions):
                    self._built.compile(conditions)
                    yield Done()
                case Settle():
                    self._phase = "settle"
                    yield self._built.settle()
                case Measure() as command:
                    self._phase = "measure"
                    yield Measured(block=self._built.measure(command))
                case Collect(step=step):
                    self._phase = "metrics"
                    yield Collected(metrics=self._built.once.take(step))
                case Stop():
                    return

    @property
    def _built(self) -> LiveCell:
        if self._cell is None:
            raise ValueError("the first command must be `prepare`")
        return self._cell

    def _announce(self, phase: str) -> None:
        self._phase = phase
        self._send(Phase(name=phase))

    def _send(self, message: Record) -> None:
        rest = memoryview(encode(message))
        while rest:  # the pipe is unbuffered, so that a write may be a part only
            rest = rest[self._replies.write(rest) :]


def _leave(code: int) -> NoReturn:
    """End this process at once.

    Freeing communicators may hang in a process whose CUDA graphs contain collectives, or whose peer has ended. Other
    processes need a second or more to free graphs and modules one by one, which the driver does at once. Every answer
    has been sent, so no clean-up is needed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def enter_environment(spec: CellSpec) -> None:
    """Set what torch and its compilers read when they start: cache folders and the share of the cores.

    Raises:
        RuntimeError: torch is imported already, and may have read the old values.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the cell's environment was set")
    cache = Path(spec.cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / INDUCTOR),
        "TRITON_CACHE_DIR": str(cache / TRITON),
        "TORCHINDUCTOR_COMPILE_THREADS": str(spec.compile_threads),
        # PyTorch ends an idle pool of compilers after a minute. A cell that was built early may compile only then, and
        # ending the pool once took four minutes; or it would end during a measurement.
        "TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL": "0",
        "OMP_NUM_THREADS": str(spec.cpu_threads),
        # Results are stored in host memory while modes are compared, gigabytes in each of eight processes. Allocating
        # them in pages of 4 KB takes longer than the program.
        "THP_MEM_ALLOC_ENABLE": "1",
    }


def failure(error: Exception | SystemExit, phase: str) -> Failed:
    """Describe an exception for the runner: a status, and one line that names phase and cause."""
    return Failed(
        status=status_of(error, phase),
        error=f"{phase}: {type(error).__name__}: {_summary(error)}",
        correctness=error.correctness if isinstance(error, Inaccurate) else None,
    )


def status_of(error: BaseException, phase: str) -> Status:
    """Return the status of a cell after an exception. Lack of memory comes first, however deeply it is wrapped."""
    if any(_is_out_of_memory(cause) for cause in _causes(error)):
        return Status.OOM
    if isinstance(error, CellError):
        return error.status
    if "torch" in sys.modules:
        from optimizations import torch_internals

        if isinstance(error, torch_internals.TorchDynamoException):
            return Status.COMPILE_ERROR
    return _STATUS_OF_PHASE.get(phase, Status.RUN_ERROR)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is torch's or Python's for lack of memory, or has such a message of CUDA or cuBLAS."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "CUDA out of memory" in text
        or "CUDA error: out of memory" in text
        or "CUBLAS_STATUS_ALLOC_FAILED" in text
    )


def _summary(error: BaseException) -> str:
    """Return the message's first line, and the second if the first ends with a colon, as of failed backends."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return "(no message)"
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def end_with_parent() -> None:
    """End this process and its children as soon as its parent has ended for any reason.

    A thread is needed because compiling takes minutes in which no command is read.
    """
    parent = os.pidfd_open(os.getppid())

    def watch() -> None:
        select.select([parent], (), ())
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
