"""What runner and worker say to each other: one JSON object a line, over two pipes of their own.

A worker holds one cell. It is started as `suite.worker --read FD --write FD`; its stdout and stderr go to a
log file, so nothing a library prints can be taken for a message. The runner sends commands and gets at least one reply
each:

    prepare -> phase* then prepared | failed     build, compare with eager, compile, warm up and record
    measure -> block | failed                    one block of samples
    metrics -> metrics | failed                  profile one steady iteration
    stop    -> (the process ends)

A line that is no such message, or a pipe that closes early, ends the cell with a status (`bad_output`, `crash`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from suite.schema import Block, CompileTimes, Correctness, Metrics, Record, Status

PHASES = ("build", "check", "compile", "warm-up", "measure", "metrics")
"""Phases in the order a cell goes through them, as the progress display names them."""


class CellSpec(Record):
    """Everything a worker needs to know of its cell.

    `cpu_threads` is this worker's share of the cores while modes compile side by side. `cache_dir` is where compiled
    kernels go: a folder of the cell's own, or one shared by all with `--warm-cache`.
    """

    workload: str
    variant: str
    size: Literal["full", "tiny"]
    mode: str
    device: Literal["cuda", "cpu"]
    with_optimizer: bool
    seed: int
    input_sets: int
    warm_up: int
    check_inputs: int
    cpu_threads: int
    cache_dir: str
    warm_cache: bool


class Prepare(Record):
    do: Literal["prepare"] = "prepare"
    spec: CellSpec


class Measure(Record):
    do: Literal["measure"] = "measure"
    index: int
    turn: int
    samples: int
    throughput_iterations: int


class CollectMetrics(Record):
    do: Literal["metrics"] = "metrics"


class Stop(Record):
    do: Literal["stop"] = "stop"


class Phase(Record):
    type: Literal["phase"] = "phase"
    name: str


class Prepared(Record):
    type: Literal["prepared"] = "prepared"
    parameters: int
    input_bytes: int
    correctness: Correctness
    compile: CompileTimes
    reserved_bytes: int | None


class Measured(Record):
    type: Literal["block"] = "block"
    block: Block


class Collected(Record):
    type: Literal["metrics"] = "metrics"
    metrics: Metrics


class Failed(Record):
    """The worker could not go on; it ends after sending this."""

    type: Literal["failed"] = "failed"
    status: Status
    error: str
    correctness: Correctness | None = None


Command = Annotated[Prepare | Measure | CollectMetrics | Stop, Field(discriminator="do")]
Reply = Annotated[Phase | Prepared | Measured | Collected | Failed, Field(discriminator="type")]

COMMANDS: TypeAdapter[Command] = TypeAdapter(Command)
REPLIES: TypeAdapter[Reply] = TypeAdapter(Reply)


def encode(message: Record) -> bytes:
    """One message as a line."""
    return message.model_dump_json().encode() + b"\n"
