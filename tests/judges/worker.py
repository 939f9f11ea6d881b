"""Runs samples that come as JSON lines and answers with rows: `python -m tests.judges.worker DEVICE`.

DEVICE is `cuda` or `simulated`. A line before each compiler names the one that a crash is due to.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import FORCED_BRANCHES, JSON_WORKER, trial
from .cases import NoSample, case
from .databases import Task, entries, tolerances

GONE = 17
"""Exit code of a worker that lost its device."""


def main(arguments: Sequence[str]) -> int:
    device = arguments[0]
    say = JSON_WORKER.channel()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    prepare()
    say({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            for row in judged(Task.parse(command["task"]), command["compilers"], device, say):
                say({"row": row})
        except trial.DeviceGone as error:
            say({"gone": str(error)})
            return GONE
        say({"done": True})
        if device != "simulated":
            torch.cuda.empty_cache()  # other workers need memory, too
    return 0


def prepare() -> None:
    """Make the backend known where the project is not installed."""
    FORCED_BRANCHES.force_if_asked()
    if "encore" not in torch._dynamo.list_backends(exclude_tags=()):
        from optimizations.backend import encore

        torch._dynamo.register_backend(encore, name="encore")


def judged(
    task: Task, compilers: Sequence[str], device: str, say: Callable[[dict[str, Any]], None]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each compiler, or a single one with the reason why the sample is not judged."""
    where = "cpu" if device == "simulated" else device
    say({"begin": "eager"})
    try:
        program = case(task, where)
        expected = trial.run(program, where, trial.eager, lambda: 0)
        if expected.error:  # such as: the offset in memory must be divisible by 2
            program = case(task, where, misaligned=())
            expected = trial.run(program, where, trial.eager, lambda: 0)
    except trial.DeviceGone:
        raise
    except NoSample as reason:
        yield {"task": task.key, "compiler": "eager", "skipped": str(reason)}
        return
    except Exception as error:
        if trial.is_lost(error):
            raise trial.DeviceGone(trial.described(error)) from None
        yield {"task": task.key, "compiler": "eager", "skipped": f"no sample: {trial.described(error)}"}
        return
    again = trial.run(program, where, trial.eager, lambda: 0)
    bounds = tolerances(entries(task.database)[task.name], getattr(torch, task.dtype), torch.device(where).type)
    reason = expected.error or trial.difference(again, expected, *bounds)
    if reason:
        words = "eager raises" if expected.error else "eager differs from itself"
        yield {"task": task.key, "compiler": "eager", "skipped": f"{words}: {reason}"}
        return
    plain = None
    repeats = trial.unlike_bits(again, expected) is None
    for compiler in compilers:
        say({"begin": compiler})
        found = _outcome(program, compiler, device)
        row: dict[str, Any] = {"task": task.key, "compiler": compiler}
        wrong = trial.difference(found, expected, *bounds)
        row.update(passed=wrong is None, replays=found.replays, seconds=round(found.seconds, 3))
        if compiler == "encore":
            row["read_in_place"] = found.read_in_place
        if wrong:
            row["wrong"] = wrong
        if compiler == "compile":
            plain = found
        elif plain is not None and repeats and (unlike := trial.unlike_bits(found, plain)):
            row["unlike_compile"] = unlike
        yield row


def _outcome(program: Any, compiler: str, device: str) -> trial.Outcome:
    if device != "simulated":
        with trial.counted_replays() as replays, trial.compiled_by(compiler) as compile_:
            return trial.run(program, device, compile_, replays)
    from . import simulated

    if compiler == "compile":
        with simulated.plain() as compile_:
            return trial.run(program, "cpu", compile_, lambda: 0)
    with simulated.encore(trial.COMPILERS[compiler]) as (compile_, replays):
        return trial.run(program, "cpu", compile_, replays)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
