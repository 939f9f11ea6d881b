"""Runs a program eager, and as a step that is captured, and says whether the results are eager's, bit for bit.

A program whose results eager does not repeat may be far from itself in one pair of runs and near in another (a small
GoogLeNet: 2 to 66 units in 17 runs). So a step that is far is compared with the largest distance of several runs.

Where results are not eager's, two differences of a captured step are tried in eager: learning rates that change are
tensors of float32 from some call on, and `is_current_stream_capturing` returns True in some calls.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from step_parts import CAPTURE_CHECK, Program, outcome

import optimizations
from library_programs.record import CALLS
from optimizations.report.steps import StepReport

Make = Callable[[str], Program]
SPREAD = 4
"""Results are near if they differ from eager at most so many times as much as eager from itself."""
MORE_RUNS = 4
"""Further runs of eager if a step is far from it. Two may agree by chance."""
EQUAL, NEAR, RATES, TOLD = (
    "equal",
    "within four times eager's own spread",
    "as with rates as tensors",
    "as told of a capture",
)
DIFFERS, FAILS, NOT_RUN = "differs", "fails", "not run"
BAD = frozenset({DIFFERS, FAILS})


@dataclass(frozen=True)
class Distance:
    """Difference of two lists of results: the largest of a tensor over its largest value, and the number of tensors."""

    worst: float
    tensors: int


def distance(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> Distance:
    """Return the distance of two lists of results. `worst` is infinite for other shapes, or for NaN only here."""
    if len(mine) != len(theirs):
        return Distance(math.inf, max(len(mine), len(theirs)))
    found = [_relative(one, other) for one, other in zip(mine, theirs, strict=True) if not _is_same(one, other)]
    return Distance(max(found, default=0.0), len(found))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.allclose(one.double(), other.double(), rtol=0, atol=0, equal_nan=True)


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return math.inf
    found = (one.double() - other.double()).abs().max().item() / max(other.double().abs().max().item(), 1e-30)
    return math.inf if math.isnan(found) else found


def row(name: str, make: Make, device: str, check_every: Any = None) -> dict[str, Any]:
    """Return a program's row: `verdict`, and how it was found. `check_every` is an option of `graph_step`."""
    at, where = time.monotonic(), "eager"
    found: dict[str, Any] = {"name": name}
    try:
        eager = _eager(make, device)
        again = _eager(make, device)
        where = "step"
        mine, report = _as_step(make, device, check_every)
        found |= _judged(make, device, mine, eager, again)
        found |= {"replays": report.replays, "calls": CALLS, "recordings": len(report.recordings)}
        found["refusals"] = [str(one) for one in report.refusals]
        found["audits"] = sum(one.audits for one in report.recordings)
        found |= {"not_compared": report.not_compared, "watched": sum(one.watched for one in report.recordings)}
    except ImportError as error:
        found |= {"verdict": NOT_RUN, "error": str(error)}
    except Exception as error:
        verdict = NOT_RUN if where == "eager" else FAILS
        found |= {"verdict": verdict, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    return found | {"seconds": round(time.monotonic() - at, 1)}


def _judged(
    make: Make, device: str, mine: list[torch.Tensor], eager: list[torch.Tensor], again: list[torch.Tensor]
) -> dict[str, Any]:
    step, spread = distance(mine, eager), distance(again, eager)
    found: dict[str, Any] = {"tensors": len(eager), "far": step.worst, "differ": step.tensors, "spread": spread.worst}
    if not step.tensors:
        return found | {"verdict": EQUAL}
    runs = [eager, again]
    while spread.worst * SPREAD < step.worst and len(runs) < 2 + MORE_RUNS:
        runs.append(_eager(make, device))
        spread = max(spread, *(distance(runs[-1], one) for one in runs[:-1]), key=lambda one: one.worst)
        found["spread"] = spread.worst
    if step.worst <= SPREAD * spread.worst:
        return found | {"verdict": NEAR}
    for start, end in _rate_calls():
        if not distance(mine, _eager(make, device, rates_in=range(start, end))).tensors:
            return found | {"verdict": RATES, "from_call": start, "to_call": end}
    for told in _reported_captures():
        with contextlib.suppress(Exception):  # code for captures may fail in eager
            if not distance(mine, _eager(make, device, told=told)).tensors:
                return found | {"verdict": TOLD, "told": sorted(told)}
    return found | {"verdict": DIFFERS}


def _rate_calls() -> Iterator[tuple[int, int]]:
    """From which call on rates may be tensors, those that are usual first, and until which: a step that is refused
    takes numbers again."""
    yield from ((start, CALLS) for start in (2, 3, 1, 4, 5, 6, 0, 7))
    yield from ((start, end) for start in range(1, 5) for end in range(start + 1, start + 7))


def _reported_captures() -> Iterator[set[int]]:
    """Yield calls that may be captured: some early ones, or those of one or two recordings."""
    yield from ({2}, {2, 3}, {1}, {1, 2}, {3})
    yield from (set(range(first, CALLS)) for first in (2, 3))
    half = CALLS // 2
    yield from ({*range(first, half), *range(second, CALLS)} for second in range(half, half + 5) for first in (2, 3))


def _as_step(make: Make, device: str, check_every: Any) -> tuple[list[torch.Tensor], StepReport]:
    made = make(device)
    if device == "cpu":
        from simulated_gpu.operators import CpuDevice

        from optimizations.capture.step.graphed_step import GraphedStep

        simulated = CpuDevice()
        simulated.free = None  # there is memory for audits
        step: Any = GraphedStep(made.step, device=simulated, check_every=check_every)
    else:
        step = optimizations.graph_step(made.step, check_every=check_every)
    found = _results(made, step)
    return found, step.report()


def _eager(
    make: Make, device: str, *, rates_in: Collection[int] = (), told: Collection[int] = ()
) -> list[torch.Tensor]:
    """Results of a run without graphs.

    Args:
        rates_in: calls in which learning rates are tensors of float32.
        told: calls in which `is_current_stream_capturing` returns True.
    """
    made_optimizers: list[torch.optim.Optimizer] = []
    first = torch.optim.Optimizer.__init__

    def noted(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        first(self, *args, **kwargs)
        made_optimizers.append(self)

    with mock.patch.object(torch.optim.Optimizer, "__init__", noted):
        made = make(device)
    calls = 0

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        with _capture_is_reported() if calls - 1 in told else contextlib.nullcontext():
            return made.step(*args, **kwargs)

    if rates_in:
        for optimizer in made_optimizers:
            _take_tensors(optimizer, lambda: calls - 1 in rates_in)
    return _results(made, step)


@contextlib.contextmanager
def _capture_is_reported() -> Iterator[None]:
    """In the block the current stream is said to be captured, which no optimizer minds, `capturable` or not."""
    with (
        mock.patch("torch.cuda.graphs._cuda_isCurrentStreamCapturing", lambda: True),
        mock.patch.object(torch.optim.Optimizer, CAPTURE_CHECK, lambda self: None),
    ):
        yield


def _take_tensors(optimizer: torch.optim.Optimizer, now: Callable[[], bool]) -> None:
    """Let an optimizer's steps take their learning rates as tensors, whenever `now`."""
    stepped = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        kept = [group["lr"] for group in optimizer.param_groups] if now() else []
        for group, rate in zip(optimizer.param_groups, kept, strict=False):
            if isinstance(rate, float):
                group["lr"] = torch.tensor(rate, dtype=torch.float32, device=group["params"][0].device)
        try:
            return stepped(*args, **kwargs)
        finally:
            for group, rate in zip(optimizer.param_groups, kept, strict=False):
                group["lr"] = rate

    optimizer.step = step  # type: ignore[method-assign]


def _results(made: Program, step: Callable[..., Any]) -> list[torch.Tensor]:
    return [
        one.detach().clone() if isinstance(one, torch.Tensor) else torch.tensor(float(one))
        for one in outcome(made, step)
    ]
