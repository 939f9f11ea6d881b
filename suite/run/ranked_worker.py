"""Run the processes of one cell as one worker: one process, or one for each rank where the workload is split over GPUs.

All ranks get the same command at the same time, and their answers become one: of times the slowest rank's, of what is
counted rank 0's, and all ranks' own are kept. Ranks wait for one another in collectives, so one that fails, dies or
hangs leaves the others waiting: they get a few seconds to tell what they saw, and then the cell has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from suite.measure.gpu import visible_gpus
from suite.results.schema import Block, Correctness, Status
from suite.run import process
from suite.run.guard import make_folder, remove_folder
from suite.run.process import Answer, Worker, converse
from suite.worker.protocol import Built, Collected, Command, Compiled, Done, Failed, Measured, Prepared

OnPhase = Callable[["RankedWorker", str], None]


class RankedWorker:
    """Hold the workers of one cell, by rank. End them with `end`.

    Attributes:
        rendezvous: a file that the ranks meet by; None of one rank.
    """

    def __init__(self, command: Sequence[str], log: Path, ranks: int, device: str) -> None:
        self.ranks: list[Worker] = []
        self._folder = make_folder("encore-ranks-") if ranks > 1 else None
        self.rendezvous = str(self._folder / "store") if self._folder else None
        gpus = visible_gpus() if ranks > 1 and device == "cuda" else []
        try:
            for rank in range(ranks):
                own = log if rank == 0 else log.with_name(f"{log.stem}.rank{rank}{log.suffix}")
                env = {"CUDA_VISIBLE_DEVICES": gpus[rank]} if gpus else {}
                self.ranks.append(Worker(command, own, env))
        except BaseException:
            process.end(self.ranks, ask_first=False)
            self.remove_folder()
            raise

    def remove_folder(self) -> None:
        """Remove the folder; called once no rank runs any more."""
        if self._folder is not None:
            remove_folder(self._folder)


@dataclass(frozen=True, slots=True)
class Answered:
    """Hold an answer of a cell: what it says as a whole, what each rank says, and which rank it failed on."""

    whole: Answer
    by_rank: tuple[Answer, ...]
    failed_rank: int = 0


def converse_ranked(
    requests: Mapping[RankedWorker, Sequence[Command]],
    timeout_s: float,
    on_phase: OnPhase = lambda worker, phase: None,
) -> dict[RankedWorker, Answered]:
    """Run `process.converse` with cells, each of which gets a command for each rank. Phases are those of rank 0."""
    first = {cell.ranks[0]: cell for cell in requests}

    def announced(worker: Worker, phase: str) -> None:
        if worker in first:
            on_phase(first[worker], phase)

    answers = converse(
        {
            worker: command
            for cell, commands in requests.items()
            for worker, command in zip(cell.ranks, commands, strict=True)
        },
        timeout_s,
        announced,
        companions={worker: cell.ranks for cell in requests for worker in cell.ranks},
    )
    arrival = list(answers)
    return {cell: _joined(cell, answers, arrival) for cell in requests}


def _joined(cell: RankedWorker, answers: Mapping[Worker, Answer], arrival: Sequence[Worker]) -> Answered:
    by_rank = tuple(answers[worker] for worker in cell.ranks)
    failed = [
        (rank, answer)
        for worker in arrival
        for rank, answer in enumerate(by_rank)
        if worker is cell.ranks[rank] and isinstance(answer, Failed)
    ]
    if failed:
        # What a rank says of itself comes before what the others say of it, and a rank that died says nothing.
        failed.sort(key=lambda one: (_WEIGHT.get(one[1].status, 2), one[1].error.endswith(process.COMPANION_FAILED)))
        rank, told = failed[0]
        return Answered(told if len(by_rank) == 1 else _told_by_rank(failed), by_rank, rank)
    whole = by_rank[0] if len(by_rank) == 1 else _WHOLE[type(by_rank[0])](by_rank)
    return Answered(whole, by_rank)


_WEIGHT = {Status.OOM: 0, Status.FAIL_ACCURACY: 1, Status.CRASH: 1, Status.TIMEOUT: 3}
"""Weights by which a cell gets one rank's status: lack of memory has an answer; a waiting rank is no cause."""


def _told_by_rank(failed: Sequence[tuple[int, Failed]]) -> Failed:
    by_error: dict[str, list[int]] = {}
    for rank, answer in failed:
        by_error.setdefault(answer.error, []).append(rank)
    text = "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))}: {error}"
        for error, ranks in by_error.items()
    )
    return failed[0][1].model_copy(update={"error": text})


def _first(answers: Sequence[Answer]) -> Answer:
    return answers[0]


def _prepared(answers: Sequence[Prepared]) -> Prepared:
    first = answers[0]
    reserved = [answer.reserved_bytes for answer in answers if answer.reserved_bytes is not None]
    slowest = max(answers, key=lambda answer: answer.compile.warm_up_s)
    return first.model_copy(
        update={
            "correctness": worst([answer.correctness for answer in answers]),
            "compile": slowest.compile,
            "reserved_bytes": max(reserved, default=None),
            "iteration_us": max(answer.iteration_us for answer in answers),
        }
    )


def worst(found: Sequence[Correctness | None]) -> Correctness | None:
    """Return one correctness of all ranks: the largest error, the digests of rank 0, deterministic if all are."""
    told = [one for one in found if one is not None]
    if not told:
        return None
    shown = max(told, key=lambda one: (not one.passed, one.max_relative_error))
    deterministic = all(one.deterministic for one in told)
    first = told[0]
    update = {"digests": first.digests, "varying": first.varying, "deterministic": deterministic}
    return shown.model_copy(update=update)


def _measured(answers: Sequence[Measured]) -> Measured:
    return Measured(block=slowest([answer.block for answer in answers]))


def slowest(blocks: Sequence[Block]) -> Block:
    """Return one block of all ranks' blocks: each sample is the slowest rank's time. The rest is rank 0's."""
    first = blocks[0]
    device = [block.device_us for block in blocks if block.device_us is not None]
    throughput = [block.throughput_us for block in blocks if block.throughput_us is not None]
    return first.model_copy(
        update={
            "host_us": [max(samples) for samples in zip(*(block.host_us for block in blocks), strict=True)],
            "device_us": [max(samples) for samples in zip(*device, strict=True)] if device else None,
            "throughput_us": max(throughput, default=None),
        }
    )


_WHOLE: Mapping[type, Callable[..., Answer]] = {
    Built: _first,
    Compiled: _first,
    Done: _first,
    Prepared: _prepared,
    Measured: _measured,
    Collected: _first,
}


def end(cells: Iterable[RankedWorker], *, ask_first: bool) -> None:
    """End cells and everything they started; return when none of it is left."""
    cells = list(cells)
    process.end([worker for cell in cells for worker in cell.ranks], ask_first=ask_first)
    for cell in cells:
        cell.remove_folder()
