"""Runs the program on its paths, one process each, in turns. Imports no torch."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from encore.own_packages import script
from models.nanogpt.configurations import NAMED, SIZES, SWEEP, Configuration
from models.registry import Size
from suite.nanogpt.paths import DecodePath
from suite.nanogpt.records import (
    ANSWERS,
    NANOGPT_SCHEMA_VERSION,
    Answer,
    Ask,
    Done,
    Failed,
    Generation,
    MeasuredConfiguration,
    NanoGptRun,
    PathRecord,
    Question,
    Ready,
    Settle,
    Settled,
)
from suite.results.schema import Environment
from suite.run import guard
from suite.run.supervise import Supervised, await_exit, end

WORKER_COMMAND = script("suite.nanogpt.worker")
STOP_GRACE_S = 10.0
SETTLE_S = 60.0
"""How long a path generates before it is measured, at most, until Encore has nothing pending; no longer than half of
what is waited for an answer. Until 2026-11-26 there were 20 generations of 7 steps, a tenth of a second: Encore's paths
were still trying out and timing while they were measured."""

Save = Callable[[NanoGptRun], None]
Say = Callable[[str], None]


def run_paths(
    paths: Sequence[DecodePath],
    environment: Environment,
    *,
    device: str,
    size: Size,
    seed: int,
    rounds: int,
    timeout_s: float,
    save: Save,
    say: Say,
    command: Sequence[str] = WORKER_COMMAND,
) -> NanoGptRun:
    """Measure every configuration on every path, `rounds` times.

    In a round each configuration runs once on every path, so that its samples lie all over the run: a process can be
    slow for many generations on end, and those of one configuration must not all lie there.

    `save` is given the record after each round, so that an interrupt costs one. A path that fails, or gives no answer
    within `timeout_s`, has its reason in its record and keeps what it has measured; the others go on.
    """
    with _processes(paths, device, size, seed, command) as workers:
        records = {path.name: PathRecord(name=path.name, summary=path.summary) for path in paths}
        context = SIZES[size].context
        taken: dict[Configuration, dict[str, list[Generation]]] = {
            configuration.within(context): {} for configuration in (*NAMED, *SWEEP)
        }

        def record(done: int) -> NanoGptRun:
            return NanoGptRun(
                nanogpt_schema_version=NANOGPT_SCHEMA_VERSION,
                environment=environment,
                size=size,
                rounds=done,
                paths=list(records.values()),
                configurations=[_joined(configuration, parts) for configuration, parts in taken.items() if parts],
            )

        def failed(name: str, reason: str) -> None:
            records[name] = records[name].model_copy(update={"failed": reason})
            end([workers.pop(name)])
            say(f"{name}: {reason}")

        say(f"preparing {', '.join(workers)}")
        for name in list(workers):
            answer = workers[name].answer(timeout_s)
            if isinstance(answer, Ready):
                told = answer.model_dump(exclude={"type"})
                records[name] = records[name].model_copy(update=told)
                say(f"{name}: ready after a warm-up of {answer.warm_up_s:.2f} s")
            else:
                failed(name, _reason(answer))
        # One at a time: Encore may time calls meanwhile, which nothing should disturb.
        for name in [path.name for path in paths if path.settles and path.name in workers]:
            workers[name].ask(Settle(most_s=min(SETTLE_S, timeout_s / 2)))
            answer = workers[name].answer(timeout_s)
            if isinstance(answer, Settled):
                records[name] = records[name].model_copy(update={"settled": answer.settled})
                say(f"{name}: {'settled' if answer.settled else 'measured before it has settled'}")
            else:
                failed(name, _reason(answer))
        for done in range(1, rounds + 1):
            for configuration, collected in taken.items():
                for name in list(workers):
                    workers[name].ask(Ask(prompt=configuration.prompt, new_tokens=configuration.new_tokens))
                    answer = workers[name].answer(timeout_s)
                    if not isinstance(answer, Done):
                        failed(name, _reason(answer))
                        continue
                    parts = collected.setdefault(name, [])
                    parts.append(answer.generation)
                    if parts[-1].tokens != parts[0].tokens:
                        failed(name, f"{configuration.name}: two generations from one seed sampled different tokens")
            save(record(done))
            say(f"round {done} of {rounds}")
            if not workers:
                break
        return record(done)


def _joined(configuration: Configuration, collected: Mapping[str, Sequence[Generation]]) -> MeasuredConfiguration:
    """Rounds put together; a path that failed in one has what it did in those before."""
    return MeasuredConfiguration(
        name=configuration.name,
        prompt=configuration.prompt,
        new_tokens=configuration.new_tokens,
        paths={
            name: Generation(
                tokens=parts[0].tokens,
                total_s=[value for part in parts for value in part.total_s],
                prompt_us=[value for part in parts for value in part.prompt_us],
                step_us=[value for part in parts for value in part.step_us],
                call_us=[value for part in parts for value in part.call_us],
            )
            for name, parts in collected.items()
        },
    )


def _reason(answer: Answer) -> str:
    return answer.error if isinstance(answer, Failed) else f"gave another answer than it was asked for ({answer.type})"


class PathProcess(Supervised):
    """A worker of one path, spoken to over two pipes of its own."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self._buffer = b""
        read, self._questions = os.pipe()
        self._answers, write = os.pipe()
        try:
            whole = [*command, "--read", str(read), "--write", str(write)]
            super().__init__(whole, log, pass_fds=(read, write), env=env)
        except BaseException:
            os.close(self._questions)
            os.close(self._answers)
            raise
        finally:
            os.close(read)
            os.close(write)

    def ask(self, question: Question) -> None:
        """A process that is gone is noticed when its answer is awaited."""
        with suppress(BrokenPipeError):
            os.write(self._questions, question.model_dump_json().encode() + b"\n")

    def answer(self, timeout_s: float) -> Answer:
        """The next one; `Failed` with a reason where there is none within so many seconds."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return Failed(error=f"no answer within {timeout_s:.0f} s; {self._told()}")
                chunk = os.read(self._answers, 2**16)
                if not chunk:
                    await_exit([self], STOP_GRACE_S)
                    return Failed(error=f"its process {self.exit_description()}; {self._told()}")
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return ANSWERS.validate_json(line)
        except ValidationError:
            return Failed(error=f"its answer is none: {line[:200]!r}; {self._told()}")

    def leave(self) -> None:
        """Ask for no more, so that it ends by itself."""
        os.close(self._questions)
        self._questions = -1

    def reap(self) -> None:
        super().reap()
        for descriptor in (self._questions, self._answers):
            if descriptor >= 0:
                os.close(descriptor)

    def _told(self) -> str:
        lines = self.log_tail().splitlines()
        return f"last line of its log: {lines[-1][:300]!r}" if lines else "its log is empty"


@contextmanager
def _processes(
    paths: Sequence[DecodePath], device: str, size: str, seed: int, command: Sequence[str]
) -> Iterator[dict[str, PathProcess]]:
    """A process for each path, all started at once, each with an empty folder for compiled kernels."""
    workers: dict[str, PathProcess] = {}
    with guard.temporary_folder("encore-nanogpt-") as folder:
        try:
            for path in paths:
                options = ("--path", path.name, "--device", device, "--size", size, "--seed", str(seed))
                caches = {
                    f"{name}_CACHE_DIR": str(folder / path.name / name.lower()) for name in ("TORCHINDUCTOR", "TRITON")
                }
                workers[path.name] = PathProcess([*command, *options], folder / f"{path.name}.log", caches)
            yield workers
            for worker in workers.values():
                worker.leave()
            await_exit(workers.values(), STOP_GRACE_S)
        finally:
            end(workers.values())
