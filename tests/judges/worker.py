"""Runs samples that come as lines of JSON and answers with rows: `python -m tests.judges.worker DEVICE`.

DEVICE is `cuda` or `simulated`, the device of the other tests, which needs no GPU and no C++ compiler.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from forced_branches import force_if_asked
from worker_pool import DeviceGone, serve

from optimizations import torch_internals

from . import trial
from .cases import NoSample, case
from .databases import Task, entries, tolerances


def main(device: str) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Other workers need memory, too.
    after = torch.cuda.empty_cache if device == "cuda" else lambda: None
    return serve(prepare, lambda key, compilers, say: judged(Task.parse(key), compilers, device, say), after)


def prepare() -> None:
    """Make the backend known where the project is not installed."""
    force_if_asked()
    if "encore" not in torch._dynamo.list_backends(exclude_tags=()):
        from optimizations.backend import encore

        torch._dynamo.register_backend(encore, name="encore")


def judged(
    task: Task, compilers: Sequence[str], device: str, say: Callable[[dict[str, Any]], None]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each compiler, or a single one with the reason why the sample is not judged."""
    where = "cpu" if device == "simulated" else device
    unjudged = {"task": task.key, "compiler": "eager"}
    say({"begin": "eager"})
    try:
        program = case(task, where)
        expected = trial.run(program, where, trial.eager, lambda: 0)
        if expected.error:  # such as: the offset in memory must be divisible by 2
            program = case(task, where, misaligned=())
            expected = trial.run(program, where, trial.eager, lambda: 0)
    except DeviceGone:
        raise
    except NoSample as reason:
        yield {**unjudged, "skipped": str(reason)}
        return
    except Exception as error:
        if trial.is_lost(error):
            raise DeviceGone(trial.described(error)) from None
        yield {**unjudged, "skipped": f"no sample: {trial.described(error)}"}
        return
    again = trial.run(program, where, trial.eager, lambda: 0)
    bounds = tolerances(entries(task.database)[task.name], getattr(torch, task.dtype), torch.device(where).type)
    reason = expected.error or trial.difference(again, expected, *bounds)
    if reason:
        words = "eager raises" if expected.error else "eager differs from itself"
        yield {**unjudged, "skipped": f"{words}: {reason}"}
        return
    plain = None
    repeats = trial.unlike_bits(again, expected) is None
    for compiler in compilers:
        say({"begin": compiler})
        with (on_gpu if device == "cuda" else on_simulated)(compiler) as (compile_, replays):
            found = trial.run(program, where, compile_, replays)
        row: dict[str, Any] = {"task": task.key, "compiler": compiler}
        wrong = trial.difference(found, expected, *bounds)
        row.update(passed=wrong is None, replays=found.replays, seconds=round(found.seconds, 3))
        if wrong:
            row["wrong"] = wrong
        if compiler == "compile":
            plain = found
        elif plain is not None and repeats and (unlike := trial.unlike_bits(found, plain)):
            row["unlike_compile"] = unlike
        yield row


Compiling = tuple[Callable[[Any], Any], Callable[[], int]]
"""`torch.compile` with a compiler's keywords, and the number of graphs that this process has launched."""


@contextlib.contextmanager
def on_gpu(compiler: str) -> Iterator[Compiling]:
    """Provide a compiler; what it made is gone afterwards."""
    _reset()
    try:
        with trial.counted_replays() as replays, torch_internals.inductor_config.patch(trial.INDUCTOR):
            yield lambda target: torch.compile(target, **trial.COMPILERS[compiler]), replays
    finally:
        _reset()


def _reset() -> None:
    import optimizations

    torch_internals.reset_dynamo()
    optimizations.reset()


@contextlib.contextmanager
def on_simulated(compiler: str) -> Iterator[Compiling]:
    """Provide plain compile, or Encore, with the settings of the simulated device."""
    import pytest
    from simulated_gpu.compiler import INDUCTOR, simulated

    patch = pytest.MonkeyPatch()
    try:
        if compiler == "compile":
            torch_internals.reset_dynamo()
            with torch_internals.fresh_cache(), torch_internals.inductor_config.patch(INDUCTOR):
                yield torch.compile, lambda: 0
            torch_internals.reset_dynamo()
        else:
            playing = simulated(patch)
            world = next(playing)
            yield lambda target: torch.compile(target, **trial.COMPILERS[compiler]), lambda: world.cuda.replays
            next(playing, None)
    finally:
        patch.undo()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
