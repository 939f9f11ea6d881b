"""Whatever a program does while ways to serve its calls take turns, its results are right."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from selection_on_cpu import W, make, selection
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
