"""Examine a user's program before it is measured: make it, move it, and run it three times in a separate process.

An error is reported in one sentence before any mode compiles: a wrong `make`, too little memory, or results that cannot
be compared. The command itself imports neither torch nor the program.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from encore.own_packages import NAMES, script
from models import registry
from models.registry import DtypePolicy, Task, Workload
from suite.results.errors import WrongUse
from suite.results.schema import Record
from suite.run.asked import answer, ask
from suite.run.matrix import require_program_name

COMMAND = script("suite.run.own_program")
TIMEOUT_S = 300.0
SAME_ERROR = 10.0
"""Results depend on random numbers if two seeds differ by this factor more than two calls with one seed."""


@dataclass(frozen=True, slots=True)
class Question:
    """Ask whether the program `module:callable` can be measured on a device."""

    name: str
    device: str
    seed: int


class Examined(Record):
    """Hold the properties of a program, or the reason why it cannot be measured."""

    problem: str | None = None
    task: Task = "inference"
    batch: int = 1
    dtype_policy: DtypePolicy = "fp32"
    stochastic: bool = False


def examine_programs(
    names: Sequence[str], device: Literal["cuda", "cpu"], seed: int, announce: Callable[[str], None]
) -> None:
    """Examine programs, and register their records for `models.registry.find`.

    Raises:
        WrongUse: a program cannot be measured; the message has the reason.
    """
    for name in dict.fromkeys(names):
        found = examine(Question(name, device, seed), announce)
        if found.problem is not None:
            raise WrongUse(found.problem)
        if found.stochastic:
            announce(f"{name} draws random numbers: results are compared where all modes draw the same ones")
        registry.add_program(_record(name, found))


def name_programs(names: Sequence[str], variant: str | None, size: str) -> None:
    """Check the names of programs and register records without details, which is enough for a plan.

    Raises:
        WrongUse: a name is not written as `module:callable`, or is one of Encore's; or options are for workloads.
    """
    for name in names:
        require_program_name(name, variant, size)
        package = name.partition(":")[0].partition(".")[0]
        if package in NAMES:
            raise WrongUse(
                f"{name!r}: {package!r} is a package of Encore's, too; put the function into a file with another name "
                "to measure it"
            )
        registry.add_program(_record(name, Examined()))


def _record(name: str, found: Examined) -> Workload:
    def elsewhere(*_: object) -> Any:
        raise AssertionError(f"{name} is built in the processes that measure it")

    return Workload(
        acronym=name,
        name=name,
        suite="yours",
        task=found.task,
        batch=found.batch,
        dtype_policy=found.dtype_policy,
        build=elsewhere,
        inputs=elsewhere,
        builds_on_device=True,
        own=elsewhere,
        stochastic=found.stochastic,
    )


def examine(question: Question, announce: Callable[[str], None]) -> Examined:
    """Examine a program in a separate process, and return the result."""

    def say(question: Question, seconds: float) -> None:
        announce(f"running {question.name} as it is ({seconds:.0f} s)")

    say(question, 0.0)
    ((_, found),) = ask(COMMAND, [question], Examined, timeout_s=TIMEOUT_S, say=say)
    return Examined(problem=f"{question.name}: running it as it is {found}") if isinstance(found, str) else found


def _examined(question: Question) -> Examined:
    import torch

    from models.own_program import WrongProgram

    name, device, seed = question.name, question.device, question.seed
    step = "making it"
    try:
        from models.instance import instantiate
        from suite.measure.iteration import iteration, set_numerics
        from suite.measure.results import State, run_checked

        set_numerics()
        instance = instantiate(registry.find(name), device=device, seed=seed)
        step = "calling it as it is"
        inputs = instance.inputs(0)
        state = State(instance.module, inputs)
        iterate = iteration(instance, instance.module, marks_steps=False)
        first, again, other = (run_checked(instance, iterate, inputs, state, each) for each in (seed, seed, seed + 1))
        if not first.tensors:
            return Examined(problem=f"{name} returns no tensor and changes none, so there is nothing to compare")
        noise, spread = _distance(first.tensors, again.tensors), _distance(first.tensors, other.tensors)
        stochastic = spread > SAME_ERROR * noise
        if noise > 0.1:
            return Examined(
                problem=f"{name} computes something else in each call with the same seed (relative difference "
                f"{noise:.2g}), so no mode can be compared with eager; seed all that it draws from by torch.manual_seed"
            )
        workload = instance.workload
        return Examined(
            task=workload.task, batch=workload.batch, dtype_policy=workload.dtype_policy, stochastic=stochastic
        )
    except WrongProgram as error:
        return Examined(problem=str(error))
    except torch.OutOfMemoryError as error:
        free = f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.1f} GiB"
        reason = str(error).splitlines()[0]
        return Examined(problem=f"{name} does not fit: {step} needs more memory than the GPU's {free} ({reason})")
    except Exception as error:
        place = _place(error)
        return Examined(problem=f"{name}: {step} failed: {type(error).__name__}: {error}{place}")


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the largest relative difference of two results; infinite where names, shapes or integers differ."""
    from suite.measure.compare import relative_error

    if one.keys() != other.keys():
        return float("inf")
    pairs = ((tensor, other[name]) for name, tensor in one.items())
    return max(relative_error(second, first, device=first.device) for first, second in pairs)


def _place(error: Exception) -> str:
    """Return the innermost line of the user's code in an error's traceback, in brackets."""
    own = tuple(f"{Path(__file__).resolve().parents[2] / name}/" for name in NAMES)
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith((*own, "<"))]
    users = [frame for frame in outside if "/site-packages/" not in frame.filename]
    return f" ({Path(users[-1].filename).name}:{users[-1].lineno}: {users[-1].line})" if users else ""


if __name__ == "__main__":
    answer(Question, _examined)
