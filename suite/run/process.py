"""Exchange messages with the processes of cells over pipes. `suite.run.supervise` starts and ends them.

A cell has one process, or one for each rank where the workload is split over GPUs. All ranks get their commands at the
same time, and their answers are merged: the slowest rank's times and rank 0's counts.
Ranks wait for one another in collectives, so if one fails the others are killed.

`converse` returns every failure of a process (crash, hang, invalid output) as a `Failed` answer with a status, so that
callers have only two cases: the expected answer, or `Failed`.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from encore.own_packages import script
from suite.measure.gpu import visible_gpus
from suite.results.schema import Block, Correctness, Status
from suite.run import supervise
from suite.run.supervise import EXIT_GRACE_S, Supervised, TemporaryFolder, await_exit
from suite.worker.protocol import (
    REPLIES,
    WAITING,
    Collect,
    Collected,
    Command,
    Compile,
    Done,
    Failed,
    Measure,
    Measured,
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

STOP_GRACE_S = 20.0
"""Time for a worker to end by itself after `stop`: CUDA contexts and compile pools take seconds to close."""

DEATH_GRACE_S = 1.0
"""Time to wait for a rank that died when another one reports an error, which may be a consequence."""

Answer = Done | Prepared | Measured | Collected | Failed
OnPhase = Callable[["RankedWorker", str], None]

_ANSWERS: Mapping[type, type] = {
    Start: Done,
    Prepare: Done,
    Compile: Done,
    Settle: Prepared,
    Measure: Measured,
    Collect: Collected,
}
_FIRST_PHASES = {"start": "build", "prepare": "build", "collect": "metrics"}
"""First phases of commands whose name is not that of their phase."""


class Worker(Supervised):
    """Run one worker process, with separate pipes for messages."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self._buffer = bytearray()
        command_read, self._command_fd = os.pipe()
        self.reply_fd, reply_write = os.pipe()
        os.set_blocking(self.reply_fd, False)
        try:
            super().__init__(
                [*command, "--read", str(command_read), "--write", str(reply_write)],
                log,
                pass_fds=(command_read, reply_write),
                env={"CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), **env},
            )
        except BaseException:
            os.close(self._command_fd)
            os.close(self.reply_fd)
            raise
        finally:
            os.close(command_read)
            os.close(reply_write)

    def send(self, command: Command) -> None:
        """Send a command. If the worker has ended, this is detected while waiting for its answer."""
        with suppress(BrokenPipeError):
            os.write(self._command_fd, encode(command))

    def receive(self) -> tuple[list[Reply], bool]:
        """Return messages that have arrived, and whether the pipe has ended. Does not wait.

        Raises:
            ValidationError: a line is not a message.
        """
        ended = False
        with suppress(BlockingIOError):
            while chunk := os.read(self.reply_fd, 2**16):
                self._buffer += chunk
            ended = True
        *lines, self._buffer = self._buffer.split(b"\n")
        return [REPLIES.validate_json(bytes(line)) for line in lines], ended

    def reap(self) -> None:
        """Collect the exit status and close the pipes."""
        super().reap()
        for descriptor in (self._command_fd, self.reply_fd):
            os.close(descriptor)


class RankedWorker:
    """Run the workers of one cell, by rank. End them with `end`.

    Attributes:
        rendezvous: the file by which the ranks connect; None for one rank.
    """

    def __init__(self, command: Sequence[str], log: Path, ranks: int, device: str) -> None:
        self.ranks: list[Worker] = []
        self._folder = TemporaryFolder() if ranks > 1 else None
        self.rendezvous = str(Path(self._folder.name) / "store") if self._folder else None
        gpus = visible_gpus() if ranks > 1 and device == "cuda" else []
        try:
            for rank in range(ranks):
                own = log if rank == 0 else log.with_name(f"{log.stem}.rank{rank}{log.suffix}")
                env = {"CUDA_VISIBLE_DEVICES": gpus[rank]} if gpus else {}
                self.ranks.append(Worker(command, own, env))
        except BaseException:
            end([self], ask_first=False)
            raise

    def remove_folder(self) -> None:
        """Remove the folder; called once no rank runs any more."""
        if self._folder is not None:
            self._folder.cleanup()


def end(cells: Iterable[RankedWorker], *, ask_first: bool) -> None:
    """End cells and everything they started; return when none of these processes is left.

    `ask_first`: they are between commands, so send `stop` and wait for some time before killing them.
    """
    cells = list(cells)
    workers = [worker for cell in cells for worker in cell.ranks]
    if ask_first:
        for worker in workers:
            worker.send(Stop())
        await_exit(workers, STOP_GRACE_S)
    supervise.end(workers)
    for cell in cells:
        cell.remove_folder()


def converse(
    requests: Mapping[RankedWorker, Sequence[Command]],
    timeout_s: float,
    on_phase: OnPhase = lambda worker, phase: None,
) -> dict[RankedWorker, Answer]:
    """Send each cell its commands, one for each rank, and wait for all answers; return the merged ones.

    Each phase of a worker may take `timeout_s`; the phase in which it waits for other workers, `timeout_s` for each of
    them. The reported phases are those of rank 0.

    Workers run concurrently. A cell that fails does not end the others; the caller should end it. A worker that took
    too long is killed at once, because others may wait for its lock or memory, or be timed while its kernels run. A
    worker that ran out of memory ends by itself. The function waits until both have ended, to free their memory.
    """
    others = max(1, sum(len(cell.ranks) for cell in requests) - 1)
    waiting: dict[Worker, _Exchange] = {}
    for cell, commands in requests.items():
        for rank, (worker, command) in enumerate(zip(cell.ranks, commands, strict=True)):
            waiting[worker] = _Exchange(cell, rank, command, timeout_s, on_phase, others)
            worker.send(command)
    answers: dict[RankedWorker, dict[int, Answer]] = {cell: {} for cell in requests}
    failed_rank: dict[RankedWorker, int] = {}
    with selectors.DefaultSelector() as selector:
        for worker in waiting:
            selector.register(worker.reply_fd, selectors.EVENT_READ, worker)
            selector.register(worker.exit_fd, selectors.EVENT_READ, worker)
        while waiting:
            patience_s = min(exchange.deadline for exchange in waiting.values()) - time.monotonic()
            ready = {key.data for key, _ in selector.select(max(0.0, patience_s))}
            for worker, exchange in list(waiting.items()):
                if worker not in waiting or (answer := exchange.advance(worker in ready)) is None:
                    continue
                found = {exchange.rank: answer}
                if isinstance(answer, Failed):
                    failed_rank[exchange.cell], found = _ended(exchange, answer, waiting)
                answers[exchange.cell] |= found
                for each in (exchange.cell.ranks[rank] for rank in found):
                    del waiting[each]
                    selector.unregister(each.reply_fd)
                    selector.unregister(each.exit_fd)
    joined = {cell: _joined(cell, answers[cell], failed_rank.get(cell)) for cell in requests}
    failed = {cell: each.status for cell, each in joined.items() if isinstance(each, Failed)}
    holding = [cell for cell, status in failed.items() if status in (Status.OOM, Status.TIMEOUT)]
    await_exit([worker for cell in holding for worker in cell.ranks], EXIT_GRACE_S)
    return joined


def _ended(exchange: _Exchange, failed: Failed, waiting: Mapping[Worker, _Exchange]) -> tuple[int, dict[int, Answer]]:
    """End the ranks of a failed cell; return the rank that failed first, and the answers of the ranks that waited.

    Other ranks may report the loss of a rank before its end is visible here, so wait a moment for the processes to end.
    """
    cell, blamed = exchange.cell, exchange.rank
    found: dict[int, Answer] = {blamed: failed}
    others = [waiting[worker] for worker in cell.ranks if worker in waiting and worker is not exchange.worker]
    await_exit([each.worker for each in others], DEATH_GRACE_S)
    for each in others:
        killed = each.worker.was_killed()
        each.worker.signal_group(signal.SIGKILL)
        answer = each.advance(True) if killed else None
        if isinstance(answer, Failed):
            blamed = each.rank
        found[each.rank] = answer or failed
    return blamed, found


class _Exchange:
    """Track one command until its answer, with a time limit for each phase.

    A phase is timed from its first announcement, so that a worker that alternates between phases is ended as well.
    """

    def __init__(
        self, cell: RankedWorker, rank: int, command: Command, timeout_s: float, on_phase: OnPhase, others: int
    ) -> None:
        self.cell = cell
        self.rank = rank
        self.worker = cell.ranks[rank]
        self._others = others
        self._command = command
        self._timeout_s = timeout_s
        self._on_phase = on_phase
        self._phase = _FIRST_PHASES.get(command.do, command.do)
        self._started = {self._phase: time.monotonic()}
        self.deadline = self._started[self._phase] + timeout_s

    def advance(self, ready: bool) -> Answer | None:
        """Return the answer, or a failure if there will be none; None while waiting for it."""
        if ready:
            exited = self.worker.exited()
            try:
                messages, ended = self.worker.receive()
            except ValidationError as error:
                return self._failed(Status.BAD_OUTPUT, f"sent a line that is not a message: {error.errors()[0]}")
            for message in messages:
                if (answer := self._take(message)) is not None:
                    return answer
            if exited or ended:
                await_exit([self.worker], EXIT_GRACE_S)
                return self._failed(Status.CRASH, f"{self.worker.exit_description()} in phase {self._phase!r}")
        if time.monotonic() < self.deadline:
            return None
        self.worker.write_tracebacks()
        self.worker.signal_group(signal.SIGKILL)
        return self._failed(Status.TIMEOUT, f"took more than {self._patience_s:g} s in phase {self._phase!r}")

    def _take(self, message: Reply) -> Answer | None:
        if isinstance(message, Phase):
            self._phase = message.name
            self.deadline = self._started.setdefault(message.name, time.monotonic()) + self._patience_s
            if self.rank == 0:
                self._on_phase(self.cell, message.name)
            return None
        if not isinstance(message, (Failed, _ANSWERS[type(self._command)])):
            return self._failed(Status.BAD_OUTPUT, f"answered {self._command.do!r} with {message.type!r}")
        return message

    def _failed(self, status: Status, what: str) -> Failed:
        return Failed(status=status, error=f"the worker {what}")

    @property
    def _patience_s(self) -> float:
        """Return the time limit of the phase. Beyond it the worker logs its stack before it is killed."""
        if self._phase == WAITING:
            return self._others * (self._timeout_s + EXIT_GRACE_S)
        return self._timeout_s


def _joined(cell: RankedWorker, answers: Mapping[int, Answer], failed_rank: int | None) -> Answer:
    by_rank = tuple(answers[rank] for rank in range(len(cell.ranks)))
    whole: Answer = by_rank[failed_rank or 0]
    if len(by_rank) == 1:
        return whole
    match whole:
        case Failed():
            return whole.model_copy(update={"error": f"rank {failed_rank}: {whole.error}", "rank": failed_rank})
        case Prepared():
            return _prepared([answer for answer in by_rank if isinstance(answer, Prepared)])
        case Measured():
            return Measured(block=slowest([answer.block for answer in by_rank if isinstance(answer, Measured)]))
    return whole


def _prepared(answers: Sequence[Prepared]) -> Prepared:
    return answers[0].model_copy(
        update={
            "correctness": worst([answer.correctness for answer in answers]),
            "compile": max(answers, key=lambda answer: answer.compile.warm_up_s).compile,
            "iteration_us": max(answer.iteration_us for answer in answers),
        }
    )


def worst(found: Sequence[Correctness | None]) -> Correctness | None:
    """Return one correctness of all ranks: the largest error, the digests of rank 0, deterministic if all are."""
    verdicts = [one for one in found if one is not None]
    if not verdicts:
        return None
    shown = max(verdicts, key=lambda one: (not one.passed, one.max_relative_error))
    deterministic = all(one.deterministic for one in verdicts)
    first = verdicts[0]
    update = {"digests": first.digests, "varying": first.varying, "deterministic": deterministic}
    return shown.model_copy(update=update)


def slowest(blocks: Sequence[Block]) -> Block:
    """Return one block of all ranks' blocks: each sample is the slowest rank's time. The rest is rank 0's."""
    device = [block.device_us for block in blocks if block.device_us is not None]
    return blocks[0].model_copy(
        update={
            "host_us": [max(samples) for samples in zip(*(block.host_us for block in blocks), strict=True)],
            "device_us": [max(samples) for samples in zip(*device, strict=True)] if device else None,
        }
    )
