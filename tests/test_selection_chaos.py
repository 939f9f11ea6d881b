"""Whatever a program does while ways to serve its calls take turns, its results are right."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from interrupts import interrupted_at
from selection_on_cpu import RULES, W, make, pair, selection
from trees_on_cpu import Model, values

from optimizations.capture import inner_graphs
from optimizations.capture.trees.containers import managers

__all__ = ["cuda_on_cpu", "make"]


@pytest.mark.parametrize("seed", range(10))
def test_results_are_right_whatever_happens(make: Any, cuda_on_cpu: CudaOnCpu, seed: int) -> None:
    """Two functions, the second of which may read what the first returned; results held, streams, new pools, prices."""
    draw = random.Random(seed)
    prices, first = make(model=Model(cuda_on_cpu), digest="d" * 64, plain=draw.choice((5e-6, 50e-6)))
    _, second = make(model=Model(cuda_on_cpu, writes_w=seed % 2 == 0), digest="e" * 64, mutated_input_idxs=(2,))
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    arguments = []
    w, moving, marked = values(3), True, True
    for step in range(700):
        event = draw.random()
        if event < 0.01:
            cuda_on_cpu.stream = draw.randrange(3)
        elif event < 0.02:
            moving = not moving
        elif event < 0.025:
            managers()[0].leave_pool()
        elif event < 0.03:
            prices.plain, prices.copied_byte = draw.choice((5e-6, 50e-6)), draw.choice((0.0, 1e-7))
        elif event < 0.035:
            marked = not marked
        prices.may = event < 0.97
        if marked:
            torch.compiler.cudagraph_mark_step_begin()
        if moving or not arguments:
            arguments.append((values(step), values(-step)))
            del arguments[:-4]
        else:
            arguments[-1][0].fill_(step)
        x, y = arguments[-1]
        middle = first.function([x, y, W])
        between = 2 * x + y * W
        kept, passed = event > 0.9, draw.random() < 0.8
        if kept and not passed:  # stock raises where a result is held that died when the graph after it was recorded
            held.append((middle[0], between))
        inputs = [*middle, y, w] if passed else [between.clone(), y, w]
        del middle
        expected, before = 2 * between + y * w, w.clone()
        if draw.random() < 0.03:
            with inner_graphs.at_rest():
                (result,) = second.function(inputs)
        else:
            (result,) = second.function(inputs)
        assert torch.equal(result, expected), step
        assert torch.equal(w, before + (seed % 2 == 0)), step
        if kept:
            held.append((result, expected))
        del result, held[: -draw.randrange(1, 4)]
        assert all(torch.equal(one, value) for one, value in held), step
        w.clamp_(max=50)
    for one in (selection(first), selection(second)):
        assert "failed" not in (one.reason or ""), one


def _program(make: Any, cuda: CudaOnCpu, mode: str, plain: float) -> tuple[Any, Any, Any, Callable[[bool], None]]:
    """Two functions, and a step of both, whose inputs move or rest."""
    prices, first, second = pair(make, cuda, mode=mode, plain=plain)
    kept = [(values(1), values(2))]

    def step(moving: bool) -> None:
        if moving:
            kept.append((values(len(kept)), values(-len(kept))))
            del kept[:-4]
        x, y = kept[-1]
        x.add_(1)
        between = 2 * x + y * W
        torch.compiler.cudagraph_mark_step_begin()
        inputs = [*first.function([x, y, W]), y, W]
        (result,) = second.function(inputs)
        assert torch.equal(result, 2 * between + y * W)

    return prices, first, second, step


@pytest.mark.parametrize("seed", range(8))
def test_threads_that_change_and_inputs_that_move_or_rest_end_with_one_verdict(
    make: Any, cuda_on_cpu: CudaOnCpu, seed: int
) -> None:
    """In processes one after another that share stored verdicts, with interrupts."""
    draw = random.Random(seed)
    with ThreadPoolExecutor(1) as one_thread, ThreadPoolExecutor(1) as another:
        for process in range(3):
            mode = draw.choice(("measure", "stored")) if process else "measure"
            prices, first, second, step = _program(make, cuda_on_cpu, mode, draw.choice((5e-6, 50e-6)))
            before, moving, thread = prices.timed, draw.random() < 0.5, one_thread

            def some(calls: int, moving: bool, step: Callable[[bool], None] = step) -> None:
                for _ in range(calls):
                    with suppress(KeyboardInterrupt), interrupted_at(draw.randrange(4_000), "optimizations/selection/"):
                        step(moving)

            for _ in range(60):
                moving ^= draw.random() < 0.03
                thread = draw.choice((one_thread, another)) if draw.random() < 0.1 else thread
                thread.submit(some, draw.choice((1, 2, 9, 10, 20)), moving).result()
            thread.submit(lambda step=step, moving=moving: [step(moving) for _ in range(2000)]).result()
            found, timed = [selection(first), selection(second)], prices.timed
            assert found[0].state == found[1].state in ("decided", "off"), found
            assert found[0].kept == found[1].kept, found
            assert not any("failed" in (report.reason or "") for report in found), found
            assert timed - before <= (9 * RULES.most_calls if mode == "measure" else 0)
            thread.submit(step, moving).result()
            assert prices.timed == timed
