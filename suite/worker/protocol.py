"""Define the messages between runner and worker: one JSON object per line, over two pipes.

A worker runs one cell. It is started as `suite.worker.main --read FD --write FD`; its stdout and stderr go to a
log file, so nothing a library prints can be taken for a message. The runner sends commands and gets at least one reply
each:

    start   -> done | failed                     import torch and start the compilers; may be left out
    prepare -> phase* then done | failed         build, run eager for comparison, start the compilers
    compile -> phase* then done | failed         compile, warm up and record
    settle  -> prepared | failed                 call until Encore's graphs are final, compare with eager
    measure -> block | failed                    one block of samples
    collect -> metrics | failed                  one step of the metrics, after the blocks
    stop    -> (the process ends)

A line that is not such a message, or a pipe that closes early, ends the cell with a status (`bad_output`, `crash`).

The module also defines errors for cells that cannot be measured, other than the program's exceptions. It imports no
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from suite.results.schema import Block, CompileConditions, CompileTimes, Correctness, Metrics, Record, Status
from suite.settings import RunSettings

WAITING = "wait"
"""The phase in which a worker waits for others, because only one compares at a time."""
BLOCKS_PER_CORE = 10
"""Number of blocks before the core changes, so that one disturbed core does not affect all blocks."""

CollectStep = Literal["once", "profiler", "metrics", "kernels"]


class CellSpec(RunSettings):
    """Specify a worker's cell: the settings of its run, and those of the cell.

    `cpu_threads` is this worker's share of the cores while modes run concurrently, `compile_threads` the number of its
    compile workers. `cache_dir` is the folder for compiled kernels of all modes of a workload.
    `alive_together` modes of the workload are on the GPU at the same time.
    `known_digests` are those of the mode's first process, whose results were compared with eager's, and `known_varying`
    the tensors whose bits changed between calls there; a later process with the same ones needs no comparison.
    `known_iteration_us` is the time of an iteration there. A workload that is split over GPUs has `tp` processes, this
    one is `rank`; they connect by the file `rendezvous`. `vec_isa_ok` is an earlier cell's result, see `Done`, and
    `headers_dir` has the compiled headers of C++ kernels of all cells. `stochastic`: a user's program draws random
    numbers.
    """

    workload: str
    variant: str
    mode: str
    cpu_threads: int
    compile_threads: int = 1
    tp: int | None = None
    rank: int = 0
    rendezvous: str | None = None
    alive_together: int = 1
    known_digests: list[str] | None = None
    known_varying: list[dict[str, list[float]]] | None = None
    known_iteration_us: float | None = None
    cache_dir: str
    vec_isa_ok: bool | None = None
    headers_dir: str | None = None
    stochastic: bool = False


class Start(Record):
    """Start what needs no GPU and is the same for every cell, before it is known what else the cell needs."""

    do: Literal["start"] = "start"
    spec: CellSpec


class Prepare(Record):
    do: Literal["prepare"] = "prepare"
    spec: CellSpec


class Compile(Record):
    """Compile the cell. `conditions` are noted with the compile times."""

    do: Literal["compile"] = "compile"
    conditions: CompileConditions


class Settle(Record):
    """Settle the cell, once all cells of its group have compiled."""

    do: Literal["settle"] = "settle"


class Measure(Record):
    """Measure a block. `lead_in` iterations precede the samples; the calling thread is bound to `core` unless None."""

    do: Literal["measure"] = "measure"
    process: int = 0
    index: int
    turn: int
    samples: int
    lead_in: int = 2
    core: int | None = None


class Collect(Record):
    """Collect one step of the metrics.

    `once` needs no profiler, and is answered before the profiler is loaded, which may end the worker. `profiler` loads
    the profiler and measures nothing, so that all cells do it at the same time. `metrics` profiles, and returns all
    metrics. `kernels` is for a mode's later processes.
    """

    do: Literal["collect"] = "collect"
    step: CollectStep


class Stop(Record):
    do: Literal["stop"] = "stop"


class Phase(Record):
    type: Literal["phase"] = "phase"
    name: str


class Done(Record):
    """Answer that a step is done. `vec_isa_ok`: whether C++ can use all vector instructions; None: not known."""

    type: Literal["done"] = "done"
    vec_isa_ok: bool | None = None


class Prepared(Record):
    """Answer that the cell is prepared. `correctness` None: the digests are the known ones. `iteration_us` is the time
    of an iteration, roughly."""

    type: Literal["prepared"] = "prepared"
    parameters: int
    input_bytes: int
    correctness: Correctness | None
    compile: CompileTimes
    iteration_us: float


class Measured(Record):
    type: Literal["block"] = "block"
    block: Block


class Collected(Record):
    """Answer with what is known after a step; None for `profiler`."""

    type: Literal["metrics"] = "metrics"
    metrics: Metrics | None


class Failed(Record):
    """Report that the worker could not go on; it ends after sending this. The runner adds the `rank` of its process."""

    type: Literal["failed"] = "failed"
    status: Status
    error: str
    correctness: Correctness | None = None
    rank: int = 0


Command = Annotated[
    Start | Prepare | Compile | Settle | Measure | Collect | Stop,
    Field(discriminator="do"),
]
Reply = Annotated[Phase | Done | Prepared | Measured | Collected | Failed, Field(discriminator="type")]

COMMANDS: TypeAdapter[Command] = TypeAdapter(Command)
REPLIES: TypeAdapter[Reply] = TypeAdapter(Reply)


def encode(message: Record) -> bytes:
    """Return one message as a line."""
    return message.model_dump_json().encode() + b"\n"


def core_for(block: int, cores: Sequence[int], *, process: int = 0, rank: int = 0, ranks: int = 1) -> int | None:
    """Return the core that the calling threads of all modes are bound to in this block; None without a choice.

    Each process of a mode starts at a different core, so that few long blocks do not share one; ranks share none.
    """
    apart = len(cores) // ranks
    if apart == 0 or len(cores) == 1:
        return None
    return cores[(rank * apart + process + block // BLOCKS_PER_CORE) % len(cores)]


class CellError(Exception):
    """Report that the cell cannot be measured; `status` is how it ends."""

    status = Status.RUN_ERROR


class Unsupported(CellError):
    """Report that this machine cannot run the cell."""

    status = Status.UNSUPPORTED


class OomTogether(CellError):
    """Report that the modes that should be on this GPU at the same time need more memory than it has; fewer may fit."""

    status = Status.OOM


class Inaccurate(CellError):
    """Report that the mode computes something else than eager."""

    status = Status.FAIL_ACCURACY

    def __init__(self, correctness: Correctness) -> None:
        self.correctness = correctness
        super().__init__(
            f"{correctness.worst} differs from eager by a relative error of {correctness.max_relative_error:.3g}, "
            f"allowed is {correctness.tolerance:.3g} for {correctness.compute_dtype}"
        )
