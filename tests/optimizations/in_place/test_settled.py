"""A function is settled after at most 30 calls: work beyond a recording is bounded, and nothing is decided later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from simulated_gpu.compiler import CompiledOnCpu
from torch import nn

import optimizations
from optimizations.in_place import budget
from optimizations.in_place.budget import (
    FEWEST_BEFORE_A_RACE,
    FEWEST_REPLAYS,
    FREE_SHARE,
    MOST_REPLAYS,
    Use,
    waiting_for_memory,
)
from optimizations.race import CALLS
from optimizations.trees.containers import managers
from tests.optimizations.in_place.test_without_placeholder import Two

MOST_CALLS = 30
CALLS_AFTER = 1000
INPUTS = 20
SIZES = (3, 5, 7)


@functools.cache
def values(step: int, rows: int = 3) -> torch.Tensor:
    """Return inputs that lie where kernels may read them, and apart from what was ever graph memory.

    Their storage begins there: Dynamo guards on an offset in it where sizes are dynamic.
    """
    memory = numpy.zeros(4 * rows + 128, numpy.float32)
    skip = -(memory.ctypes.data // 4) % 128
    return torch.from_numpy(memory[skip : skip + 4 * rows]).view(rows, 4).copy_(torch.arange(4.0) + 0.01 * step)


@pytest.fixture(autouse=True)
def _inputs_are_there() -> None:
    for step in range(INPUTS):
        for rows in SIZES:
            values(step, rows)


def inference(net: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[int], None]:
    def call(step: int) -> None:
        with torch.no_grad():
            assert torch.equal(run(values(step % INPUTS)), net(values(step % INPUTS)))

    return call


def training(
    net: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], accumulated: int = 1
) -> Callable[[int], None]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def call(step: int) -> None:
        run(values(step % INPUTS)).square().sum().backward()
        if step % accumulated == accumulated - 1:
            optimizer.step()
            optimizer.zero_grad()

    return call


def accumulation(net: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[int], None]:
    return training(net, run, accumulated=4)


def dynamic_shapes(net: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[int], None]:
    """Three sizes alternate. Each is a separate function for CUDA graphs."""

    def call(step: int) -> None:
        with torch.no_grad():
            for rows in SIZES:
                x = values(step % INPUTS, rows)
                assert torch.equal(run(x), net(x))

    return call


def decisions() -> list[Any]:
    """Return all that was decided so far, by recording."""
    return [
        (
            node.session.stage,
            node.session.off,
            sorted(node.session.in_place),
            node.function.decision,
            node.function.without_graph,
            node.copied_per_replay,
        )
        for one in managers()
        for node in one.nodes()
        if node.session is not None
    ]


@pytest.mark.parametrize("selection", ["off", "rule"])
@pytest.mark.parametrize("program", [inference, training, accumulation, dynamic_shapes])
def test_program_settles_within_thirty_calls(
    compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch, program: Any, selection: str
) -> None:
    monkeypatch.setattr(budget, "FEWEST_REPLAYS", FEWEST_REPLAYS)
    torch.manual_seed(0)
    net = Two()
    dynamic = program is dynamic_shapes
    options = {"selection": selection}
    call = program(net, torch.compile(net, backend="encore", dynamic=dynamic, options=options))
    settled_after = None
    for step in range(MOST_CALLS):
        call(step)
        # A recording that comes later is not there yet.
        settled_after = (settled_after or step + 1) if optimizations.settled() and decisions() else None
    assert settled_after is not None, [node.session.waiting for one in managers() for node in one.nodes()]
    assert settled_after > FEWEST_REPLAYS
    before, captures = decisions(), sum(compiled_on_cpu.captures)
    if program in (inference, dynamic_shapes):  # what a forward saves is copied
        assert any(one[2] for one in before)
    for step in range(MOST_CALLS, MOST_CALLS + CALLS_AFTER // (3 if dynamic else 1)):
        call(step)
        assert optimizations.settled()
    assert (decisions(), sum(compiled_on_cpu.captures)) == (before, captures)


def test_rarely_replayed_recording_is_unchanged(
    compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sets of weights: one is used in one of 40 calls."""
    monkeypatch.setattr(budget, "FEWEST_REPLAYS", FEWEST_REPLAYS)
    net = Two()
    run = torch.compile(net, backend="encore", options={"selection": "off"})
    often, seldom = net.first.data, torch.eye(4) * 0.125
    for step in range(400):
        net.first.data = seldom if step % 40 == 20 else often
        with torch.no_grad():
            assert torch.equal(run(values(step % INPUTS)), net(values(step % INPUTS)))
        if step == 100:
            assert optimizations.settled()
            before = decisions()
    assert decisions() == before
    assert sorted(len(one[2]) for one in before) == [0, 1]


# Work beyond a recording begins and ends after a number of replays, and stays within free memory.


def test_in_place_work_is_bounded_by_replays() -> None:
    use, due, over = Use(), [], []
    for replay in range(1, 40):
        use.replays += 1
        due += [replay] * use.due
        over += [replay] * use.is_over
    assert (due[0], over[0]) == (FEWEST_REPLAYS, MOST_REPLAYS)


def test_race_leaves_replays_for_later_work() -> None:
    use = Use(replays=FEWEST_BEFORE_A_RACE)
    assert use.may_race and not use.due
    after = FEWEST_BEFORE_A_RACE + 2 * (CALLS + 1)
    assert after < MOST_REPLAYS
    use.replays = MOST_REPLAYS + 5  # its times were there late
    use.extend(8)
    assert not use.is_over


def test_at_most_a_share_of_free_memory_is_used() -> None:
    assert waiting_for_memory(int(1000 * FREE_SHARE), 1000) is None
    assert "501 B are needed, and half of the free 1000 B" in str(waiting_for_memory(501, 1000))
