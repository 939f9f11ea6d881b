"""Measuring costs a share of compile time, for all groups of a compilation together."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from selection_on_cpu import make, run, selection
from trees_on_cpu import Model

from optimizations.selection.budget import SHARE
from optimizations.selection.decide import Rules
from optimizations.selection.selector import Selector
from optimizations.selection.series import MOST_RESTARTS, NO_SHARE_LEFT, Series
from optimizations.selection.settings import Settings

__all__ = ["cuda_on_cpu", "make"]

TWO = ("none", "copy")


def measured(selector: Selector, seconds: Callable[[str], float], calls: int = 10**6) -> None:
    """Serve turns until it is decided, or for so many calls."""
    for _ in range(calls):
        turn = selector.next_turn()
        if turn is None:
            return
        selector.record(turn, seconds(turn.candidate))


def noisy(none: float, copy: float) -> Callable[[str], float]:
    draw = random.Random(2)
    return lambda name: {"none": none, "copy": copy}[name] * draw.lognormvariate(0, 0.4)


@pytest.mark.parametrize("groups", [1, 2, 5, 20])
def test_all_groups_of_a_compilation_cost_a_fifth_of_it_and_their_shortest_measurement_at_most(groups: int) -> None:
    settings = Settings("measure", compile_s=1.0)
    times = noisy(1e-3, 1.3e-3)
    costs = []
    for group in range(groups):
        series = Series()
        selector = series.begin(TWO, [settings], groups - group, seed=group)
        if selector == NO_SHARE_LEFT:
            break
        assert isinstance(selector, Selector)
        measured(selector, times)
        series.charge()
        costs.append(selector.spent.excess_s)
    assert settings.excess_s == pytest.approx(sum(costs))
    a_round = Rules().block_calls * len(TWO) * 0.6e-3
    assert sum(costs) <= SHARE * 1.0 + groups * a_round, "each may go on to the end of its round"
    assert len(costs) == groups or settings.excess_s >= SHARE * 1.0


def test_nothing_is_measured_once_the_share_is_used_up() -> None:
    settings = Settings("measure", compile_s=1.0, excess_s=SHARE)
    assert Series().begin(TWO, [settings], 1, seed=0) == NO_SHARE_LEFT


def test_graphs_of_others_that_are_recorded_again_cost_what_recording_them_took() -> None:
    settings = Settings("measure", compile_s=10.0)
    series = Series()
    selector = series.begin(TWO, [settings], 1, seed=0, behind_s=0.9)
    assert isinstance(selector, Selector)
    assert selector.spent.excess_s == 0.9
    measured(selector, lambda name: 1e-3 if name == "none" else 2e-3, calls=16)
    spent = selector.spent.excess_s
    assert spent > 0.9
    assert series.restart()
    assert settings.excess_s == pytest.approx(spent)
    again = series.begin(TWO, [settings], 1, seed=0, behind_s=1.0)
    assert isinstance(again, Selector)
    assert again.spent.excess_s == pytest.approx(spent + 0.1), "those of the first time are there"
    measured(again, lambda name: 0.5 if name == "none" else 1.0)
    assert again.decision is not None
    assert again.ended_by == "cost"


def test_nothing_is_measured_where_recording_graphs_of_others_again_costs_more_than_measuring_may() -> None:
    settings = Settings("measure", compile_s=10.0)
    assert Series().begin(TWO, [settings], 4, seed=0, behind_s=0.6) == (
        "behind a call without a graph, graphs of other functions would be recorded again, for about 0.6 s; "
        "measuring may cost 0.5 s, and half of it that way"
    )
    assert settings.excess_s == 0.0
    assert isinstance(Series().begin(TWO, [Settings("measure")], 4, seed=0, behind_s=99.0), Selector)


def test_without_a_compile_time_there_is_no_limit_but_that_of_calls() -> None:
    selector = Series().begin(TWO, [Settings("measure", rules=Rules(most_calls=96))], 1, seed=0)
    assert isinstance(selector, Selector)
    measured(selector, lambda name: 1.0 if name == "none" else 100.0)
    assert selector.decision is not None


def test_what_a_measurement_that_was_forgotten_has_cost_counts_once() -> None:
    settings = Settings("measure", compile_s=10.0)
    series, expected = Series(), 0.0
    for _ in range(3):
        selector = series.begin(TWO, [settings], 1, seed=0)
        assert isinstance(selector, Selector)
        measured(selector, lambda name: 1e-3 if name == "none" else 2e-3, calls=16)
        expected += 1e-3 * selector.measured_calls[TWO[1]]
        series.charge()
        series.charge()
        assert series.restart()
        assert settings.excess_s == pytest.approx(expected)
    for _ in range(MOST_RESTARTS - 3):
        assert series.restart()
    assert not series.restart()


def test_measuring_that_begins_again_has_no_more_calls_than_once() -> None:
    """Without a verdict in between: a program that changes all the time is not measured for ever."""
    series, settings = Series(), Settings("measure", rules=Rules(most_calls=100))
    calls = 0
    for _ in range(MOST_RESTARTS):
        selector = series.begin(TWO, [settings], 1, seed=0)
        assert isinstance(selector, Selector)
        for _ in range(30):
            turn = selector.next_turn()
            if turn is None:
                assert 100 <= calls <= 100 + 2 * Rules().block_calls, "the last round is brought to its end"
                return
            calls += 1
            selector.record(turn, 1.0 + 0.1 * random.Random(calls).random())
        series.restart()
    pytest.fail("it never ends")


@pytest.mark.parametrize("kept", ["none", "copy"])
def test_a_verdict_begins_the_count_of_calls_again(kept: str) -> None:
    series, settings = Series(), Settings("measure", rules=Rules(most_calls=100))
    for _ in range(4):
        selector = series.begin(TWO, [settings], 1, seed=0)
        assert isinstance(selector, Selector)
        measured(selector, lambda name: 1.0 if name == kept else 3.0)
        assert selector.decision is not None
        assert (selector.decision.kept, selector.says_little) == (kept, False)
        series.forget_times()


@pytest.mark.parametrize("end", ["memory is short", "out of memory", "another is measured"])
def test_what_was_measured_without_a_verdict_counts_for_all_groups(
    make: Any, cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    _, compiled = make(plain=20e-6, launch=10e-6)
    run(compiled, 60)
    settings = compiled.functions[0].member.settings
    assert (selection(compiled).state, settings.excess_s) == ("measuring", 0.0)
    if end == "memory is short":
        monkeypatch.setattr(cuda_on_cpu.tools, "free_bytes", lambda: 64)
        run(compiled, 20)
    elif end == "out of memory":
        compiled.functions[0].member.group.ran_out_of_memory(compiled.functions[0].member)
    else:
        _, other = make(model=Model(cuda_on_cpu), digest="e" * 64)
        run(other, 500)
    assert selection(compiled).state in ("off", "waiting")
    assert settings.excess_s == pytest.approx(selection(compiled).excess_s) != 0


def test_a_verdict_that_says_little_is_not_stored(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    """Or each later process would keep what a budget of a warm compile cache had no room to tell."""
    _, compiled = make(plain=20.0, launch=15.0)
    run(compiled, 3)
    compiled.functions[0].member.settings.compile_s = 1.0
    run(compiled, 60)
    report = selection(compiled)
    assert (report.state, report.kept, report.outcome) == ("decided", "indirection", "unresolved")
    assert report.not_stored == "too little was measured to tell candidates apart"
    assert not compiled.functions[0].member.settings.store.list()


def test_a_program_whose_compilation_was_short_keeps_its_graphs_unmeasured(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    """The first function uses the share up; the second is served as without selection, for a reason."""
    prices, first = make(model=Model(cuda_on_cpu), digest="d" * 64, plain=1.0)
    _, second = make(model=Model(cuda_on_cpu), digest="e" * 64)
    settings = first.functions[0].member.settings if first.functions else None
    run(first, 3)
    settings = first.functions[0].member.settings
    settings.compile_s = 1e-3
    run(first, 300)
    report = selection(first)
    assert (report.state, report.budget_s) == ("decided", pytest.approx(SHARE * 1e-3))
    assert report.budget_s < report.excess_s < 5.0, "a block of calls of a second each has overdrawn it"
    run(second, 3)
    second.functions[0].member.settings = settings
    timed = prices.timed
    run(second, 100)
    assert report.voided == (), "whether inputs move was not known after so few calls"
    assert (selection(second).state, selection(second).reason) == (
        "off",
        NO_SHARE_LEFT,
    )
    assert prices.timed == timed
