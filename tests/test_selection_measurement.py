"""Which of the program's calls is whose turn: iterations, their order, and times that come in late."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from selection_on_cpu import W, make, pair, run_pair, selection
from trees_on_cpu import values

from optimizations.selection.decide import Rules
from optimizations.selection.measurement import MOST_UNDER_WAY, Measurement
from optimizations.selection.order import CHANGED, Order
from optimizations.selection.selector import Selector

__all__ = ["cuda_on_cpu", "make"]

CANDIDATES = ("none", "copy", "indirection")
TIMES = {"none": 30e-6, "copy": 10e-6, "indirection": 20e-6}


class Device:
    """Is through with an iteration `ahead` iterations later."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.now = 0
        self.factor = 1.0
        self.candidate = ""
        self.noise = random.Random(1)
        self.started: list[str] = []

    def begin(self) -> None:
        self.started.append(self.candidate)

    def end(self) -> Any:
        return Late(self, TIMES[self.candidate] * self.factor * self.noise.gauss(1, 0.01))


class Late:
    def __init__(self, device: Device, seconds: float) -> None:
        self.device, self.known_at, self.time = device, device.now + device.ahead, seconds

    def seconds(self) -> float | None:
        return self.time if self.device.now >= self.known_at else None


def iterate(found: Measurement, device: Device, runs: dict[str, int], count: int) -> int:
    """Iterations of one call; how many of them were somebody's turn."""
    turns = 0
    for _ in range(count):
        device.now += 1
        found.begin_iteration({1})
        turn = found.next_turn() if found.knows_order else None
        if turn is not None:
            turns += 1
            device.candidate = turn.candidate
            found.begin(turn, {1: (runs["none"], 1)})
        found.called(1)
        if turn is not None:
            runs["none"] += turn.candidate == "none"
            assert found.ends_here
            found.end(found.stop(), {1: (runs["none"], 1)})
    return turns


def test_a_host_far_ahead_of_its_device_serves_few_turns_of_which_nothing_is_known() -> None:
    device, runs = Device(ahead=1000), {"none": 0}
    found = Measurement(Selector(CANDIDATES, Rules()), device)
    assert iterate(found, device, runs, 900) in range(MOST_UNDER_WAY, MOST_UNDER_WAY + Rules().block_calls)
    turns = MOST_UNDER_WAY
    while found.selector.decision is None:
        turns += iterate(found, device, runs, 50)
        assert device.now < 3000
    assert found.selector.decision.kept == "copy"
    assert turns < 2 * MOST_UNDER_WAY + 200


def test_turns_that_wait_for_times_leave_blocks_whole() -> None:
    device, runs = Device(ahead=500), {"none": 0}
    found = Measurement(Selector(CANDIDATES, Rules(block_calls=5)), device)
    iterate(found, device, runs, 400)
    assert len(device.started) % 5 == 0
    blocks = [device.started[start : start + 5] for start in range(0, len(device.started), 5)]
    assert all(len(set(block)) == 1 for block in blocks)


def test_times_of_before_say_nothing_after_circumstances_changed() -> None:
    """They are under way when it is noticed, and would be taken for times of the same places in new rounds."""
    device, runs = Device(ahead=60), {"none": 0}
    found = Measurement(Selector(CANDIDATES, Rules()), device)
    device.factor = 1e6
    iterate(found, device, runs, 62)
    assert found.void("the program went on to another stream")
    device.factor = 1.0
    iterate(found, device, runs, 400)
    assert max(found.selector.medians.values()) < 1e-3
    assert all(max(times) < 1e-3 for times in found.selector._seconds.values())


def test_an_order_that_changes_for_good_is_noticed_and_a_detour_is_not() -> None:
    order = Order()

    def iteration(*calls: int) -> None:
        order.begin({1, 2})
        for call in calls:
            order.called(call)

    for _ in range(4):
        iteration(1, 2)
    assert order.learned == (1, 2)
    for _ in range(CHANGED - 1):
        iteration(1, 2, 2)
    iteration(1, 2)
    assert not order.changed
    for _ in range(2 * CHANGED):
        iteration(1)
    assert not order.changed, "one function is not called any more: nothing else could be learned"
    for _ in range(CHANGED + 3):
        iteration(1, 2, 2)
    assert order.changed


def orders(*iterations: tuple[int, ...], members: tuple[int, ...] = (1, 2), backwards: tuple[int, ...] = ()) -> Order:
    """Told of these; 1 leads."""
    order = Order()
    for calls in iterations:
        for call in calls:
            if call == 1:
                order.begin(set(members), backwards)
            order.called(call)
    order.begin(set(members), backwards)
    return order


@pytest.mark.parametrize(
    ("iteration", "backwards", "learned"),
    [
        ((1, 2), (), (1, 2)),
        ((1, 1, 2), (), (1, 1, 2)),
        ((1, 1, 2, 2), (2,), (1, 1, 2, 2)),
        ((1, 2, 1), (2,), None),  # its backwards belong to forwards of the step before
        ((1, 1, 1, 2, 1, 2, 2), (2,), (1, 1, 1, 2, 1, 2, 2)),
        ((*(1,) * 8, 2), (2,), (*(1,) * 8, 2)),
        ((*(1,) * 9, 2), (2,), None),
        ((1,), (), None),
    ],
)
def test_iterations_in_which_the_leader_is_called_again_are_learned(
    iteration: tuple[int, ...], backwards: tuple[int, ...], learned: tuple[int, ...] | None
) -> None:
    found = orders(*[iteration] * 4, backwards=backwards).learned
    if learned is None:
        assert found != iteration
        assert found is None or found[-1] in backwards
    else:
        assert found is not None
        assert sorted(found) == sorted(learned)
        if backwards:
            assert found[-1] in backwards, "or a step would be served in two ways"


def test_an_iteration_that_was_left_early_is_followed_by_whole_ones() -> None:
    order = orders(*[(1, 1, 2)] * 4, backwards=(2,))
    assert order.learned == (1, 1, 2)
    begun, complete = [], []
    for calls in ((1, 1, 2), (1, 1, 2), (1,), (1, 1, 2), (1, 1, 2), (1, 1, 2)):
        for call in calls:
            if call == 1:
                complete.append(order.complete)
                begun.append(order.begin({1, 2}, (2,)))
            order.called(call)
    # The call that was left alone takes the place of a first one; what follows is out of step once.
    assert begun == [True, False, True, False, True, False, True, True, False, True, False]
    assert complete == [False, False, True, False, True, False, False, False, False, True, False]


def test_a_program_whose_order_changes_is_measured_in_the_new_one(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    _, first, second = pair(make, cuda_on_cpu, plain=50e-6)
    for step in range(100):
        x, y = values(step), values(step + 1)
        torch.compiler.cudagraph_mark_step_begin()
        inputs = [*first.function([x, y, W]), y, W]
        second.function(inputs)
        second.function([x, y, W])
    assert selection(first).state == "measuring"
    group = first.functions[0].member.group
    assert group._series.restarts == 0
    run_pair(first, second, 70)
    assert group._series.restarts == 1
    run_pair(first, second, 500)
    assert selection(first).state == "decided", selection(first)


def test_the_bound_on_outstanding_times_is_above_any_round() -> None:
    """Or no round could ever be whole."""
    assert 2 * len(CANDIDATES) * Rules().block_calls <= MOST_UNDER_WAY
