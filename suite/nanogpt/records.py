"""What `encore run nanogpt` writes, and what its processes say to each other. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from suite.results.schema import Environment, Record

NANOGPT_SCHEMA_VERSION = 1

Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A time that was measured: tables divide by it, and take its logarithm."""


class Generation(Record):
    """One path's generations of one configuration, every sample.

    Attributes:
        tokens: what was sampled, the same in every generation (which is checked).
        total_s: host time of whole generations, from the prompt's start until the device is done.
        prompt_us: host time of the prompt, of the generations below.
        step_us: of generations that waited for the device around each step: from before the token is fed until the
            device is done. `call_us` is the article's time: between two CUDA events around the step, without feeding;
            on a CPU host time.
    """

    tokens: list[int]
    total_s: list[Time]
    prompt_us: list[Time]
    step_us: list[list[Time]]
    call_us: list[list[Time]]


class PathRecord(Record):
    """A path and how its process went.

    `warm_up_s` is the time from making the decoder until its first generation was through: compiling, or capturing,
    and recording. `settled`: whether Encore had nothing pending when measurements began, None where it is not in use.
    `failed` says why there are no further measurements.
    """

    name: str
    summary: str
    warm_up_s: float | None = None
    settled: bool | None = None
    device: str | None = None
    failed: str | None = None


class MeasuredConfiguration(Record):
    """A configuration as it was run (the tiny size shortens it), and what each path did."""

    name: str
    prompt: int
    new_tokens: int
    paths: dict[str, Generation]

    def differing(self) -> dict[str, int]:
        """Paths that sampled other tokens than the first one, with the place of the first that differs."""
        if not self.paths:  # all have failed before
            return {}
        (_, first), *others = self.paths.items()
        return {
            name: next(i for i, pair in enumerate(zip(first.tokens, other.tokens, strict=True)) if pair[0] != pair[1])
            for name, other in others
            if other.tokens != first.tokens
        }


class NanoGptRun(Record):
    """`nanogpt.json`. `rounds`: how many were done; in one, each configuration runs once on every path."""

    nanogpt_schema_version: int
    environment: Environment
    size: str
    rounds: int
    paths: list[PathRecord]
    configurations: list[MeasuredConfiguration]

    def findings(self) -> list[str]:
        """What is wrong: paths that failed, and other tokens from the same seed."""
        failed = [f"{path.name}: {path.failed}" for path in self.paths if path.failed]
        return failed + [
            f"{configuration.name}: {path} sampled another token than the first path at place {place}"
            for configuration in self.configurations
            for path, place in configuration.differing().items()
        ]


class Ready(Record):
    type: Literal["ready"] = "ready"
    warm_up_s: float
    device: str


class Settled(Record):
    """`settled`: see `PathRecord`."""

    type: Literal["settled"] = "settled"
    settled: bool


class Done(Record):
    type: Literal["done"] = "done"
    generation: Generation


class Failed(Record):
    type: Literal["failed"] = "failed"
    error: str


class Settle(Record):
    """Generate until Encore has nothing pending, please, for so many seconds at most."""

    type: Literal["settle"] = "settle"
    most_s: float


class Ask(Record):
    """One generation of each kind, please."""

    type: Literal["ask"] = "ask"
    prompt: int
    new_tokens: int


Question = Annotated[Settle | Ask, Field(discriminator="type")]
QUESTIONS: TypeAdapter[Question] = TypeAdapter(Question)

Answer = Annotated[Ready | Settled | Done | Failed, Field(discriminator="type")]
ANSWERS: TypeAdapter[Answer] = TypeAdapter(Answer)
