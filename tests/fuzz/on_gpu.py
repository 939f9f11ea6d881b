"""Compare random programs on a GPU, eager against Encore, with graphs that are recorded, examined and replayed.

    python -m tests.fuzz.on_gpu --seconds 180 --jobs 13

Two programs take turns in each step, so that their graphs share memory. Arguments come at new addresses, on some calls
misaligned; attributes are written from outside between calls; buffers are pinned with a copy into them in flight; in
every other pair the device runs later than the host; all results are kept, some overwritten by the caller, and read at
the end. Where Encore differs from eager, stock's compiler without CUDA graphs is compared too: a program that differs
there as well differs by arithmetic, and does not count.

Workers are processes (`tests/support/worker_pool.py`): a program that loses the CUDA context, or ends its process,
costs its worker, and is reported if stock's compiler survives it. Exit code 1 if any program differs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from forced_branches import concurrency, force_if_asked
from worker_pool import Pool, serve

from .compare import _generator, _write
from .programs import CALLS, Built, Program, build, draw, text
from .sources import INPUTS, Input, memory_and_view, view_of

STEPS = 14
"""Calls of each program: warm-up, recording, second capture, trials and replays."""

PAIR = 2
"""Programs that take turns."""

BEHIND_CYCLES = 4_000_000
"""Some 2 ms of work that the device has left, longer than a call."""

PAIR_S = 150.0
"""Most time for a pair."""

MOST_PAIRS = 100_000
ENCORE, STOCK = "encore", "stock"
WORKER = ("-P", "-m", "tests.fuzz.on_gpu", "--worker")
LOG = Path(tempfile.gettempdir()) / "encore-fuzz.log"
"""Messages of workers that are no rows."""

FEW = 8
"""One in so many pairs may have inputs that stock's compiler does not take: `UNSUPPORTED`."""

UNSUPPORTED = ("wild", "minus", "negated", "window")
"""Indices out of range, at which generated code for the CPU ends its process; lazily negative tensors, which Inductor
reads as they are in memory; views that do not begin where their memory does, which it counts places from."""

APART = 10**6
"""The distance between the numbers of programs that are drawn one for another."""

FROM_CHANCE = ("rand", "bernoulli", "dropout")
"""Operations whose results differ between eager and compiled programs."""


class Model(torch.nn.Module):
    """A program as a user's module: what it holds are attributes, the rest are arguments."""

    def __init__(self, built: Built, held: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.body = built.graph_module
        self.order = [(entry.name, entry.kind == "attribute") for entry in built.used]
        self.show(held)

    def show(self, held: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        for name, is_held in self.order:
            if is_held:
                setattr(self, f"held_{name}", held[name][1])

    def forward(self, **given: torch.Tensor) -> Any:
        return self.body(*[getattr(self, f"held_{name}") if held else given[name] for name, held in self.order])


def outcome(
    programs: Sequence[Program], compiled: Callable[[Model], Callable[..., Any]], *, behind: bool = False
) -> list[Any]:
    """Return all results of all calls of eager or compiled modules; the name of an error where one ends it.

    `behind`: when a call begins, the device has not done the work before it.
    """
    pairs = []
    for program in programs:
        built = build(program)
        held = {one.name: memory_and_view(one, _generator(one, 0)) for one in INPUTS if one.kind == "attribute"}
        held = {name: _pinned(name, value) for name, value in held.items()}
        model = Model(built, held)
        pairs.append((program, built, held, model, compiled(model)))
    kept: list[Any] = []
    for step in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        for program, built, held, model, call in pairs:
            if step:
                for name, way in program.writes[(step - 1) % (CALLS - 1)].items():
                    _write(held, name, way, step)
                    if way == "replaced":
                        held[name] = _pinned(name, held[name])
            model.show(held)
            given = {one.name: _given(one, step) for one in built.used if one.kind != "attribute"}
            landing = [
                (given.get(one.name, held.get(one.name, (None, None))[1]), _landing(one, step))
                for one in built.used
                if one.landing and step >= STEPS // 2
            ]
            if behind:
                torch.cuda._sleep(BEHIND_CYCLES)
            for target, source in landing:
                target.copy_(source, non_blocking=True)
            seen = _values_of(kept) if any(one.name == "wild" for one in built.used) else []
            try:
                with torch.no_grad():
                    results = call(**given)
            except IndexError as error:
                return [*seen, type(error).__name__]  # what else the call did is not defined; see the design page
            first = results[0] if results else None
            kept.append((list(results), list(given.values())))
            if program.scribbles[step % CALLS] and isinstance(first, torch.Tensor):
                with contextlib.suppress(RuntimeError):  # overlapping memory cannot be written
                    first.fill_(1)
    return _values_of(kept)


def _values_of(kept: list[Any]) -> list[Any]:
    """Synchronize, and return by call the device and values of all tensors, results and arguments."""
    torch.cuda.synchronize()
    tensors = [[one for one in (*results, *given) if isinstance(one, torch.Tensor)] for results, given in kept]
    return [[(one.device.type, one.detach().cpu().clone()) for one in values] for values in tensors]


def differs(found: list[Any], expected: list[Any]) -> str | None:
    """Return how two outcomes differ by more than rounding."""
    for number, (one, other) in enumerate(zip(found, expected, strict=False)):
        if isinstance(one, str) or isinstance(other, str):
            if one != other:
                return f"call {number}: {one if isinstance(one, str) else 'a result'}, eager {other}"
            continue
        for place, ((where, mine), (where_theirs, theirs)) in enumerate(zip(one, other, strict=True)):
            if where != where_theirs:
                return f"call {number}, tensor {place}: on {where}, eager on {where_theirs}"
            try:
                torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2, equal_nan=True)
            except AssertionError as error:
                return f"call {number}, tensor {place}: {' '.join(str(error).split())[:200]}"
    return None if len(found) == len(expected) else f"{len(found)} calls instead of {len(expected)}"


def pair(seed: int, number: int) -> list[Program]:
    return [_suitable(seed, PAIR * number + index, number % FEW == 0) for index in range(PAIR)]


def _suitable(seed: int, number: int, unsupported_too: bool) -> Program:
    """Return program `number`, or the first program drawn in its place whose results can be compared.

    Most programs have an input that stock's compiler does not support.
    """
    while True:
        program = draw(seed, number)
        built = build(program)
        targets = [str(node.target) for node in built.graph_module.graph.nodes]
        chance = any(one in target for target in targets for one in FROM_CHANCE)
        if not chance and (unsupported_too or not any(one.name in UNSUPPORTED for one in built.used)):
            return program
        number += APART


def compare(seed: int, number: int) -> tuple[str, str | None]:
    """Return the outcome of a pair ("right", "refused", "as stock", "wrong"), and how it differs."""
    programs = pair(seed, number)
    try:
        expected = outcome(programs, lambda model: model)
    except (RuntimeError, ValueError, TypeError):
        return "refused", None
    try:
        what = differs(outcome(programs, _encore(programs[0].options), behind=number % 2 == 1), expected)
    except torch.AcceleratorError:
        raise
    except Exception as error:
        what = f"raises {type(error).__name__}: {error}"[:300]
    if what is None:
        return "right", None
    torch.compiler.reset()
    try:
        stock = differs(outcome(programs, lambda model: torch.compile(model)), expected)
    except Exception as error:
        stock = f"raises {type(error).__name__}"
    return ("wrong" if stock is None else "as stock"), what


def _encore(options: dict[str, Any]) -> Callable[[Model], Callable[..., Any]]:
    return lambda model: torch.compile(model, backend="encore", options={"concurrency": concurrency(), **options})


def _pinned(name: str, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    entry = next(one for one in INPUTS if one.name == name)
    if not entry.landing:
        return value
    memory = value[0].pin_memory()
    return memory, memory


def _landing(entry: Input, step: int) -> torch.Tensor:
    """Return a value by way of a pinned buffer, on the GPU."""
    return memory_and_view(entry, _generator(entry, step + 100))[1].cuda()


def _given(entry: Input, step: int) -> torch.Tensor:
    memory, value = memory_and_view(entry, _generator(entry, step if entry.kind == "argument" else step // 2))
    if entry.layout == "negative":
        return view_of(entry, memory.cuda() if entry.on_gpu else memory)
    if entry.landing:
        return value.pin_memory()
    if not entry.on_gpu:
        return value
    if step % 3 != 2:
        return value.cuda()
    room = torch.empty(value.numel() + 1, dtype=value.dtype, device="cuda")[1:].view(value.shape)
    return room.copy_(value)


def work(seed: int) -> int:
    """Compare pairs whose numbers come from a pool, and answer with rows."""
    import optimizations
    from optimizations.in_place import budget

    budget.MOST_WORK, budget.FEWEST_REPLAYS = 1e9, 1
    torch.set_num_threads(1)

    def rows(task: str, compilers: Sequence[str], say: Callable[[Any], None]) -> Iterator[dict[str, Any]]:
        number, compiler = int(task), compilers[0]
        say({"begin": compiler})
        if compiler == STOCK:  # Encore lost this pair; stock's compiler may end the process, too
            outcome(pair(seed, number), lambda model: torch.compile(model))
        status, what = compare(seed, number) if compiler == ENCORE else ("lost", None)
        yield {"task": task, "compiler": compiler, "status": status, "what": what}

    def after() -> None:
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # the context is lost by a program that is wrong in eager mode, too
            sys.exit(1)
        optimizations.reset()
        torch.compiler.reset()

    return serve(force_if_asked, rows, after)


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="only pair N, in this process")
    parser.add_argument("--worker", type=int, metavar="SEED", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no NVIDIA GPU here; `python -m tests.fuzz` runs without one")
    if chosen.worker is not None:
        return work(chosen.worker)
    if chosen.only is not None:
        print(*compare(chosen.seed, chosen.only))
        return 0
    seen = run(chosen.seed, chosen.seconds, chosen.jobs)
    print(f"{chosen.seconds:.0f} s: {', '.join(f'{name} {count}' for name, count in sorted(seen.items()))}")
    return 1 if seen["wrong"] or seen["lost"] or not seen["right"] else 0


def run(seed: int, seconds: float, jobs: int, worker: Sequence[str] = WORKER) -> Counter[str]:
    """Count what becomes of pairs, and print each that is not right at once: a run may be ended early."""
    seen: Counter[str] = Counter()
    lost: dict[str, str] = {}

    def tell(row: dict[str, Any]) -> None:
        if "skipped" in row:  # its worker was gone before it began
            return
        if row["compiler"] == ENCORE and row.get("crashed"):
            lost[row["task"]] = row["wrong"]
        elif row["compiler"] == STOCK:
            note(row["task"], "as stock" if row.get("crashed") else "lost", lost.pop(row["task"]))
        else:
            note(row["task"], row["status"], row["what"])

    def note(task: str, status: str, what: str | None) -> None:
        seen[status] += 1
        if status == "as stock":
            print(f"as stock: {task}: {what}"[:160])
        elif status in ("wrong", "lost", "not known"):
            repeat = f"python -m tests.fuzz.on_gpu --seed {seed} --only {task}"
            print(f"{status}: {what}", *(text(one, repeat=repeat) for one in pair(seed, int(task))), "", sep="\n")
        sys.stdout.flush()

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    every = [(str(number), (ENCORE, STOCK)) for number in range(MOST_PAIRS)]
    # Without processes that compile: they would hold the pipe of a worker that ended.
    settings = {"log": LOG, "timeout_s": PAIR_S, "environment": {"TORCHINDUCTOR_COMPILE_THREADS": "1"}}
    pool = Pool((*worker, str(seed)), every, tell, size=jobs, deadline=time.monotonic() + seconds, **settings)
    with contextlib.suppress(KeyboardInterrupt):
        pool.run()
    for task, what in lost.items():
        note(task, "not known", what)
    return seen


if __name__ == "__main__":
    sys.exit(main())
