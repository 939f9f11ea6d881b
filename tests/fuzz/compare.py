"""Run a program in eager mode and placed by Encore, and return how they differ."""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from simulated_gpu.placement import bits, placed_runner, runner

from optimizations.options import Options
from optimizations.placement import place
from optimizations.placement.feed_plan import FeedPlan
from optimizations.report import PlacementReport

from .differing_gpu import DeviceLost, Landing, OnDifferingGpu, shared
from .programs import CALLS, Built, Program, build, draw, text
from .sources import INPUTS, Input, memory_and_view, random_values, write

Call = Callable[..., Any]


@dataclass(frozen=True)
class Failure:
    """A program whose results differ; `what` names the difference."""

    seed: int
    number: int
    program: Program
    what: str

    def __str__(self) -> str:
        repeat = f"python -m tests.fuzz --seed {self.seed} --only {self.number}"
        return f"{self.what}\n{text(self.program, repeat=repeat)}"


@dataclass
class Outcome:
    """Failures of a run, how many programs were compared, and what placement did with them."""

    failures: list[Failure] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)


def fuzz(seed: int, numbers: range, *, stop_at: int | None = None) -> Outcome:
    """Compares the programs `numbers` of `seed`; stops after `stop_at` failures."""
    outcome = Outcome()
    with one_thread():
        for number in numbers:
            program = draw(seed, number)
            what, did = compare(program)
            outcome.seen.update(did)
            if what is not None:
                outcome.failures.append(Failure(seed, number, program, what))
                if stop_at is not None and len(outcome.failures) >= stop_at:
                    break
    return outcome


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Tensors are small; threads would only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare(program: Program) -> tuple[str | None, set[str]]:
    """Return how eager and placed runs of `program` differ (None: not), and what placement did."""
    built = build(program)
    eager = runner(built.graph_module, built.inputs, OnDifferingGpu)
    try:
        expected = _calls(program, built, eager, Landing(), late=False)
    except (RuntimeError, ValueError, TypeError):
        # Fake tensors let pass what real ones refuse, such as writes to overlapping memory: no program.
        return None, {"refused"}
    options = Options(**program.options)
    try:
        placement = place(built.graph_module, built.inputs, options)
    except Exception as error:
        return f"placement fails: {type(error).__name__}: {error}", set()
    did = _did(placement.report)
    over = _over_budget(placement.feeds, options)
    if over is not None:
        return over, did
    landing = Landing()
    try:
        with landing.in_place():
            placed = placed_runner(built.graph_module, placement, built.inputs, OnDifferingGpu)
            found = _calls(program, built, placed, landing, late=True)
    except Exception as error:
        return f"raises {type(error).__name__}: {error}", did
    for number, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return f"call {number} differs", did
    return (None if len(expected) == len(found) else "another call raises"), did


def _calls(program: Program, built: Built, run: Call, landing: Landing, *, late: bool) -> list[Any]:
    """Return the results of each call, all read after the last, and its arguments, read right after it."""
    held = {entry.name: memory_and_view(entry, _generator(entry, 0)) for entry in INPUTS if entry.kind != "argument"}
    kept: list[tuple[Any, ...]] = []
    states: list[Any] = []
    may_raise = any(entry.name == "wild" for entry in built.used)
    for call in range(CALLS):
        for name, way in (program.writes[call - 1] if call else {}).items():
            _write(held, name, way, call)
        arguments = _together(built, [_argument(entry, held, call) for entry in built.used], call)
        for entry, argument in zip(built.used, arguments, strict=True):
            if entry.landing:
                landing.pin(argument)
                # Comparisons of what stays need calls before anything changes.
                if entry.kind == "argument" or call >= CALLS // 2:
                    landing.send(argument, random_values(entry.shape, entry.dtype, _generator(entry, call + 100)))
        if not late:
            landing.land_all()
        torch.default_generator.manual_seed(call)
        seen = _seen(kept, states) if may_raise else []
        try:
            results = run(*arguments)
        except DeviceLost:
            raise
        except IndexError as error:
            # What else the call did, to memory that earlier results share as well, is not defined; see the design page.
            return [*seen, type(error).__name__]
        landing.land_all()
        states.append((bits(arguments), shared([*results, *arguments])))
        kept.append(results)
        if program.scribbles[call] and results and isinstance(results[0], torch.Tensor):
            with contextlib.suppress(RuntimeError):  # overlapping memory cannot be written
                results[0].fill_(1)
    return _seen(kept, states)


def _seen(kept: list[tuple[Any, ...]], states: list[Any]) -> list[Any]:
    return [(bits(list(results)), state) for results, state in zip(kept, states, strict=True)]


def _generator(entry: Input, call: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{entry.name} {call}".encode()))


def _argument(entry: Input, held: dict[str, tuple[torch.Tensor, torch.Tensor]], call: int) -> torch.Tensor:
    if entry.kind == "argument":
        return memory_and_view(entry, _generator(entry, call))[1]
    if entry.kind == "numpy":
        # Changes once; each call gets a new tensor.
        return memory_and_view(entry, _generator(entry, call // 2))[1]
    return held[entry.name][1]


def _together(built: Built, arguments: list[torch.Tensor], call: int) -> list[torch.Tensor]:
    """`arguments`, some of which share memory in the last calls."""
    by_name = {entry.name: argument for entry, argument in zip(built.used, arguments, strict=True)}
    if call < CALLS // 2:
        return arguments
    return [
        by_name[entry.later_in].view(entry.shape) if entry.later_in in by_name else argument
        for entry, argument in zip(built.used, arguments, strict=True)
    ]


def _write(held: dict[str, tuple[torch.Tensor, torch.Tensor]], name: str, way: str, call: int) -> None:
    entry = next(entry for entry in INPUTS if entry.name == name)
    memory, view = memory_and_view(entry, _generator(entry, call))
    if way == "replaced":
        held[name] = memory, view
    else:
        if entry.layout == "window":  # written around what the program holds
            view.copy_(held[name][1])
        write(way, held[name][0], memory)


def _did(report: PlacementReport) -> set[str]:
    did = {"compared", *(hoisted.form for hoisted in report.hoisted)}
    did.update(what for what in ("staged", "before", "after", "left") if getattr(report, what))
    return did | ({"rewritten"} if report.untouched is None else set())


def _over_budget(plan: FeedPlan | None, options: Options) -> str | None:
    if plan is None:
        return None
    kept = sum(layout.size_bytes for group in plan.hoisted for layout in group.layouts)
    staged = sum(value.layout.size_bytes for value in plan.staged)
    used = {"hoist_limit_bytes": kept, "stage_limit_bytes": staged, "process_limit_bytes": kept + staged}
    over = [f"{size} bytes, more than {limit}" for limit, size in used.items() if size > getattr(options, limit)]
    return ", ".join(over) or None
