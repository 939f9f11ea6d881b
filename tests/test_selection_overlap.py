"""What waiting for the device costs a program whose host runs ahead: it is told, and counts as a cost of measuring."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from optimizations.selection import measurement as measurement_module
from optimizations.selection.decide import Rules
from optimizations.selection.measurement import Measurement
from optimizations.selection.overlap import AGAIN, FREE, Overlap
from optimizations.selection.selector import Selector

CANDIDATES = ("none", "copy")


class Machine:
    """A host and a device that work at the same time, unless one waits for the other; times in seconds."""

    def __init__(self, host_s: float, device_s: float, *, waits_itself: bool = False) -> None:
        self.now = self.device_free = 0.0
        self.host_s, self.device_s, self.waits_itself = host_s, device_s, waits_itself
        self.slower: dict[str, float] = {}
        self.serving = CANDIDATES[-1]

    def iteration(self) -> None:
        self.now += self.host_s
        work_s = self.device_s * self.slower.get(self.serving, 1.0)
        self.device_free = max(self.device_free, self.now) + work_s
        if self.waits_itself:
            self.wait()

    def wait(self) -> None:
        self.now = max(self.now, self.device_free)

    def perf_counter(self) -> float:
        return self.now

    # As a timer

    def begin(self) -> None:
        self.wait()
        self.started = self.now

    def end(self) -> Any:
        self.wait()
        seconds = self.now - self.started
        return type("Known", (), {"seconds": lambda self: seconds})()


class Noisy(Machine):
    """Its device takes up to a half longer or less, so that ways which are alike cannot be told apart soon."""

    drawn = random.Random(4)
    spread = 0.5

    def iteration(self) -> None:
        self.slower = dict.fromkeys(CANDIDATES, self.drawn.uniform(1 - self.spread, 1 + self.spread))
        super().iteration()


def measured(machine: Machine, monkeypatch: pytest.MonkeyPatch, calls: int, **keywords: Any) -> Selector:
    """What `Group` does, for one function."""
    monkeypatch.setattr(measurement_module, "time", machine)
    selector = Selector(CANDIDATES, Rules(), **keywords)
    found = Measurement(selector, machine, waits=True)
    counts = {1: (0, 1)}
    for _ in range(calls):
        found.begin_iteration({1})
        begun = False
        machine.serving = CANDIDATES[-1]
        if found.knows_order and found.leaves_alone:
            begun = found.leave_alone()
        elif found.knows_order and (turn := found.next_turn()) is not None:
            machine.serving = turn.candidate
            found.begin(turn, counts)
            begun = True
        found.called(1)
        if begun:
            found.start()
        machine.iteration()
        if found.ends_here:
            wanted = machine.serving == "none"
            before, counts = counts, {1: (counts[1][0] + wanted, 1)}
            assert before is not counts
            found.end(found.stop(), counts)
        if selector.decision is not None:
            break
    return selector


def test_iterations_that_are_left_alone_are_calls_of_the_program_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a period of the program's calls would be out of step behind each window."""
    apart, next_turn = set(), Selector.next_turn

    class Counting(Noisy):
        drawn, iterations = random.Random(5), 0

        def iteration(self) -> None:
            self.iterations += 1
            super().iteration()

    machine = Counting(1e-3, 3e-3)

    def watched(self: Selector) -> Any:
        turn = next_turn(self)
        if turn is not None:
            apart.add(machine.iterations - turn.call)
        return turn

    monkeypatch.setattr(Selector, "next_turn", watched)
    selector = measured(machine, monkeypatch, 3 * AGAIN)
    assert selector.spent.calls > AGAIN
    assert len(apart) == 1


@pytest.mark.parametrize(
    ("host_s", "device_s", "waits_itself", "lost_s"),
    [
        (1e-3, 3e-3, False, 1e-3),
        (3e-3, 1e-3, False, 1e-3),
        (1e-3, 3e-3, True, 0.0),
        (3e-3, 1e-3, True, 0.0),
        (2e-3, 1e-6, False, 1e-6),
    ],
    ids=["device ahead", "host ahead", "the program waits", "the program waits, slow host", "nothing to overlap"],
)
def test_what_is_lost_is_the_work_that_was_done_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, host_s: float, device_s: float, waits_itself: bool, lost_s: float
) -> None:
    machine = Machine(host_s, device_s, waits_itself=waits_itself)
    selector = measured(machine, monkeypatch, 120)
    spent = selector.spent
    # The way from an idle device to a full one is in the few iterations that are left alone.
    assert spent.waiting_s == pytest.approx(lost_s * spent.calls, rel=0.3, abs=1e-9)
    assert spent.excess_s == pytest.approx(spent.waiting_s)


def test_it_counts_for_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal candidates, no excess: but each measured call costs a program that runs ahead 5 ms."""
    without = measured(Machine(5e-3, 5e-3), monkeypatch, 4000)
    assert without.decision is not None
    selector = measured(Machine(5e-3, 5e-3), monkeypatch, 4000, budget_s=0.2)
    assert selector.decision is not None
    assert (selector.decision.kept, selector.decision.outcome) == ("copy", "unresolved")
    assert selector.spent.calls < without.spent.calls
    assert 0.2 < selector.spent.excess_s < 0.3


def test_a_window_that_was_wrong_is_put_right_by_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host did something else during the first one: nothing seemed to be lost, and measuring went on for ever."""

    class Busy(Noisy):
        def iteration(self) -> None:
            super().iteration()
            self.now += 20e-3 if self.now < 0.1 else 0.0

    selector = measured(Busy(5e-3, 5e-3), monkeypatch, 4000, budget_s=0.5)
    assert selector.decision is not None
    assert selector.decision.outcome == "unresolved"
    assert selector.spent.calls < 4 * AGAIN
    assert 0.5 < selector.spent.waiting_s < 0.6


@pytest.mark.parametrize(("every", "pause_s"), [(3, 0.1), (5, 1.0), (7, 0.2), (10, 0.05), (10, 0.5), (100, 5.0)])
def test_what_a_program_does_now_and_then_hides_no_loss(
    monkeypatch: pytest.MonkeyPatch, every: int, pause_s: float
) -> None:
    """It writes a log, or evaluates. Windows with that in them said that an iteration takes longer where nobody waits:
    nothing was charged, and measuring cost fifteen times what it may."""
    machine = Noisy(5e-3, 5e-3)
    machine.drawn, machine.spread = random.Random(4), 0.1
    begin_iteration = Measurement.begin_iteration
    begun = itertools.count()

    def after_a_pause(measurement: Measurement, *arguments: Any) -> bool:
        machine.now += pause_s if next(begun) % every == 0 else 0.0
        return begin_iteration(measurement, *arguments)

    monkeypatch.setattr(Measurement, "begin_iteration", after_a_pause)
    selector = measured(machine, monkeypatch, 4000, budget_s=0.4)
    spent = selector.spent
    assert spent.waiting_s == pytest.approx(5e-3 * spent.calls, rel=0.3)
    assert spent.excess_s < 0.5


def test_windows_come_again_and_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """No window stands inside of a block: its first call would pay for what comes before."""
    alone: list[bool] = []
    leave_alone = Measurement.leave_alone

    def noted(measurement: Measurement) -> bool:
        alone.append(measurement.selector.at_block_start)
        return leave_alone(measurement)

    monkeypatch.setattr(Measurement, "leave_alone", noted)
    measured(Noisy(1e-3, 3e-3), monkeypatch, 10 * AGAIN)
    assert all(alone)
    assert 2 * FREE <= len(alone) <= 12 * FREE


def test_iterations_that_are_disturbed_say_nothing() -> None:
    overlap = Overlap()
    for place in range(FREE - 1):
        assert overlap.leaves_alone
        if overlap.iteration_left_alone():
            overlap.waited(float(place))
    overlap.disturbed()
    assert overlap.leaves_alone
    overlap.waited(100.0)  # not at the first that is left alone
    assert overlap.iteration_left_alone()
    overlap.waited(200.0)
    for _ in range(FREE - 1):
        assert not overlap.iteration_left_alone()
    assert not overlap.leaves_alone
    overlap.waited(200.0 + FREE)
    assert overlap.free_s == 1.0
    overlap.disturbed()
    assert overlap.free_s == 1.0, "a detour later changes nothing"
    for _ in range(AGAIN):
        overlap.iteration_measured()
    assert overlap.iteration_left_alone()
    overlap.waited(300.0)
    overlap.disturbed()
    assert not overlap.leaves_alone, "a program that never does the same eight times in a row is measured all the same"
    overlap.waited(400.0)
    assert overlap.free_s == 1.0


def test_a_first_window_that_is_spoiled_again_and_again_is_done_without() -> None:
    """A program whose every fifth iteration is another one has no eight in a row."""
    overlap = Overlap()
    spoiled = 0
    while overlap.leaves_alone:
        if overlap.iteration_left_alone():
            overlap.waited(float(spoiled))
        overlap.iteration_left_alone()
        overlap.disturbed()
        spoiled += 1
        assert spoiled <= 100, "measuring would never begin"
    assert spoiled > 1, "one disturbed iteration must not be enough"
    for _ in range(20):
        overlap.waited(1e3)
        overlap.measured(5.0)
    assert (overlap.free_s, overlap.lost_s) == (None, 0.0)


def test_an_interrupt_before_the_first_of_them_leaves_it_unknown() -> None:
    overlap = Overlap()
    for _ in range(FREE):
        overlap.iteration_left_alone()
    overlap.waited(1.0)
    overlap.waited(2.0)
    for _ in range(20):
        overlap.measured(5.0)
    assert (overlap.free_s, overlap.lost_s) == (None, 0.0)


def test_for_throughput_nobody_waits_and_nothing_is_left_alone() -> None:
    found = Measurement(Selector(CANDIDATES, Rules()), Machine(1.0, 1.0))
    assert not found.leaves_alone
