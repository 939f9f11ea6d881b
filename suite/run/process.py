"""Talk to worker processes over two pipes each. They are started and ended by `suite.run.supervise`.

Whatever a worker does (crash, hang, garbage, closing its pipe) comes out of `converse` as a `Failed` answer with a
status, so that the code above has two cases only: the answer it asked for, or `Failed`.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from pydantic import ValidationError

from encore.own_packages import script
from suite.results.schema import Status
from suite.run import supervise
from suite.run.supervise import EXIT_GRACE_S, Supervised, await_exit
from suite.worker.protocol import (
    PHASES,
    REPLIES,
    WAITING,
    Built,
    Collected,
    CollectMetrics,
    Command,
    Compile,
    Compiled,
    Done,
    Failed,
    LoadProfiler,
    Measure,
    Measured,
    MeasureOnce,
    Phase,
    Prepare,
    Prepared,
    Reply,
    Settle,
    Start,
    Stop,
    encode,
)

WORKER_COMMAND = script("suite.worker.main")

MAX_MESSAGE_BYTES = 16 * 2**20
"""Most bytes that a worker may have sent unread: far more than any message needs."""
STOP_GRACE_S = 20.0
"""Time for a worker to end by itself after `stop`: CUDA contexts and compile pools take seconds to close."""

COMPANION_GRACE_S = 5.0
"""Time for a worker to answer once another one, which it may be waiting for, has failed."""
COMPANION_FAILED = "another one that had failed"

Answer = Built | Compiled | Prepared | Measured | Done | Collected | Failed
OnPhase = Callable[["Worker", str], None]


class BrokenProtocol(Exception):
    """Report that the worker sent what is not a message, or closed its pipe; `status` is what its cell ends with."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class Worker(Supervised):
    """Hold one worker process; messages go over their own pipes. End it with `end`."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self._buffer = bytearray()
        command_read, self._command_fd = os.pipe()
        self.reply_fd, reply_write = os.pipe()
        os.set_blocking(self.reply_fd, False)
        try:
            super().__init__(
                [*command, "--read", str(command_read), "--write", str(reply_write)],
                log,
                pass_fds=(command_read, reply_write),
                env={"CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), **(env or {})},
            )
        except BaseException:
            os.close(self._command_fd)
            os.close(self.reply_fd)
            raise
        finally:
            os.close(command_read)
            os.close(reply_write)

    def send(self, command: Command) -> None:
        """Send a command. A worker that is gone is noticed when its answer is awaited."""
        with suppress(BrokenPipeError):
            os.write(self._command_fd, encode(command))

    def receive(self) -> tuple[list[Reply], bool]:
        """Return messages that have arrived, and whether the pipe has ended. Does not wait.

        Raises:
            BrokenProtocol: a line is not a message, or too long for one.
        """
        ended = False
        with suppress(BlockingIOError):
            while chunk := os.read(self.reply_fd, 2**16):
                self._buffer += chunk
                if len(self._buffer) > MAX_MESSAGE_BYTES:
                    raise BrokenProtocol(Status.BAD_OUTPUT, f"sent more than {MAX_MESSAGE_BYTES} bytes at once")
            ended = True
        *lines, self._buffer = self._buffer.split(b"\n")
        return [_parse(line) for line in lines], ended

    def reap(self) -> None:
        """Collect the exit status and close the pipes."""
        super().reap()
        for descriptor in (self._command_fd, self.reply_fd):
            os.close(descriptor)


def _parse(line: bytearray) -> Reply:
    try:
        return REPLIES.validate_json(bytes(line))
    except ValidationError:
        shown = line[:120].decode(errors="replace")
        raise BrokenProtocol(Status.BAD_OUTPUT, f"sent a line that is not a message: {shown!r}") from None


def converse(
    requests: Mapping[Worker, Command],
    timeout_s: float,
    on_phase: OnPhase = lambda worker, phase: None,
    companions: Mapping[Worker, Collection[Worker]] = MappingProxyType({}),
) -> dict[Worker, Answer]:
    """Send each worker its command and wait for all answers; each phase of a worker may take `timeout_s`, and one in
    which it waits for the others so long for each of them.

    Workers work at the same time. One that fails does not end the others; it should be ended by the caller. Its
    `companions`, which wait for it, have `COMPANION_GRACE_S` from then on. One that took too long is killed as soon as
    its companions have answered, too: others may wait for what it holds, or are timed next to what it launched. One
    that ran out of memory ends by itself. The end of both is awaited, for others need what they hold. Answers are in
    the order they came.
    """
    others = max(1, len(requests) - 1)
    exchanges = {
        worker: _Exchange(worker, command, timeout_s, on_phase, others) for worker, command in requests.items()
    }
    answers: dict[Worker, Answer] = {}
    with selectors.DefaultSelector() as selector:
        for worker, command in requests.items():
            worker.send(command)
            selector.register(worker.reply_fd, selectors.EVENT_READ, worker)
            selector.register(worker.exit_fd, selectors.EVENT_READ, worker)
        while len(answers) < len(exchanges):
            waiting = [exchange for worker, exchange in exchanges.items() if worker not in answers]
            patience_s = min(exchange.deadline for exchange in waiting) - time.monotonic()
            ready = {key.data for key, _ in selector.select(max(0.0, patience_s))}
            for exchange in waiting:
                answer = exchange.advance(exchange.worker in ready)
                if exchange.pipe_ended and exchange.worker.reply_fd in selector.get_map():
                    selector.unregister(exchange.worker.reply_fd)
                if answer is not None:
                    answers[exchange.worker] = answer
                    _forget(selector, exchange.worker)
                    together = {exchange.worker, *companions.get(exchange.worker, ())} & exchanges.keys()
                    if isinstance(answer, Failed):
                        for other in together - answers.keys():
                            exchanges[other].companion_failed()
                    if together <= answers.keys():
                        _kill_overdue({worker: answers[worker] for worker in together})
    failed = [(worker, answer) for worker, answer in answers.items() if isinstance(answer, Failed)]
    await_exit([worker for worker, answer in failed if answer.status in (Status.OOM, Status.TIMEOUT)], EXIT_GRACE_S)
    return answers


def _kill_overdue(answers: Mapping[Worker, Answer]) -> None:
    for worker, answer in answers.items():
        if isinstance(answer, Failed) and answer.status is Status.TIMEOUT:
            worker.signal_group(signal.SIGKILL)


def _forget(selector: selectors.BaseSelector, worker: Worker) -> None:
    for descriptor in (worker.reply_fd, worker.exit_fd):
        with suppress(KeyError):
            selector.unregister(descriptor)


class _Exchange:
    """Keep one command and the way to its answer, with a clock for each phase.

    A phase's clock runs on from its first announcement, so that a worker going back and forth between phases ends too.
    """

    def __init__(self, worker: Worker, command: Command, timeout_s: float, on_phase: OnPhase, others: int = 1) -> None:
        self.worker = worker
        self._others = others
        self.pipe_ended = False
        self._command = command
        self._timeout_s = timeout_s
        self._on_phase = on_phase
        self._phase = _first_phase(command)
        self._started = {self._phase: time.monotonic()}
        self.deadline = self._started[self._phase] + timeout_s
        self._last_deadline = math.inf

    def companion_failed(self) -> None:
        """Give this worker, which may be waiting for another that failed, little time from now on."""
        self._last_deadline = min(self._last_deadline, time.monotonic() + COMPANION_GRACE_S)
        self.deadline = min(self.deadline, self._last_deadline)

    def advance(self, ready: bool) -> Answer | None:
        """Return the answer, if it is there or will not come any more; None while it is awaited."""
        try:
            if ready:
                exited = self.worker.exited()
                messages, ended = self.worker.receive()
                for message in messages:
                    if (answer := self._take(message)) is not None:
                        return answer
                if exited:
                    raise BrokenProtocol(Status.CRASH, f"{self.worker.exit_description()} in phase {self._phase!r}")
                if ended and not self.pipe_ended:
                    self.pipe_ended = True
                    self.deadline = min(self.deadline, time.monotonic() + EXIT_GRACE_S)
            if time.monotonic() >= self.deadline:
                raise self._overdue()
        except BrokenProtocol as error:
            return Failed(status=error.status, error=f"the worker {error}")
        return None

    def _take(self, message: Reply) -> Answer | None:
        if isinstance(message, Phase):
            if message.name not in PHASES:
                raise BrokenProtocol(Status.BAD_OUTPUT, f"announced an unknown phase {message.name!r}")
            self._phase = message.name
            started = self._started.setdefault(message.name, time.monotonic())
            self.deadline = min(started + self._patience_s, self._last_deadline)
            self._on_phase(self.worker, message.name)
            return None
        if not _answers(message, self._command):
            raise BrokenProtocol(Status.BAD_OUTPUT, f"answered {self._command.do!r} with {message.type!r}")
        return message

    def _overdue(self) -> BrokenProtocol:
        if self.pipe_ended:
            return BrokenProtocol(
                Status.BAD_OUTPUT, f"closed its reply pipe in phase {self._phase!r} without an answer"
            )
        if time.monotonic() >= self._last_deadline:
            return BrokenProtocol(Status.TIMEOUT, f"waited in phase {self._phase!r} for {COMPANION_FAILED}")
        self.worker.write_tracebacks()
        return BrokenProtocol(Status.TIMEOUT, f"took more than {self._patience_s:g} s in phase {self._phase!r}")

    @property
    def _patience_s(self) -> float:
        """Return what the phase may take. If it takes longer, the worker logs where it is before it is killed."""
        if self._phase == WAITING:
            return self._others * (self._timeout_s + EXIT_GRACE_S)
        return self._timeout_s


_FIRST_PHASES = {"start": "build", "prepare": "build", "once": "metrics", "profiler": "metrics"}
"""First phases of commands that are not named after theirs."""


def _first_phase(command: Command) -> str:
    return _FIRST_PHASES.get(command.do, command.do)


def _answers(message: Answer, command: Command) -> bool:
    """Return whether this is an answer to that command; a block must be the one asked for, with all its samples."""
    match message, command:
        case Failed(status=status), _:
            return status is not Status.PASS
        case Measured(block=block), Measure() as asked:
            return (block.index, block.turn, len(block.host_us)) == (asked.index, asked.turn, asked.samples)
        case (Built(), Start() | Prepare()) | (Compiled(), Compile()) | (Prepared(), Settle()):
            return True
        case (Done(), LoadProfiler()) | (Collected(), MeasureOnce() | CollectMetrics()):
            return True
    return False


def end(workers: Iterable[Worker], *, ask_first: bool) -> None:
    """End workers and everything they started; return when none of it is left.

    `ask_first`: they are between commands and get `stop` and some time to leave by themselves.
    """
    workers = list(workers)
    if ask_first:
        for worker in workers:
            worker.send(Stop())
        await_exit(workers, STOP_GRACE_S)
    supervise.end(workers)
