"""Functions of a group that are gone, called no more, or come late: what there is is measured, and not for ever."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from selection_on_cpu import RULES, make, pair, run, run_pair, selection
from test_selection_groups import FakeFunction, called_in_turn, grouped

import optimizations
from optimizations.selection import leading
from optimizations.selection.decide import Rules
from optimizations.selection.group import NOT_LED
from optimizations.selection.member import Member
from optimizations.selection.settings import Settings
from optimizations.selection.store import VerdictStore

__all__ = ["cuda_on_cpu", "make"]


@pytest.mark.parametrize("calls_before", range(8))
@pytest.mark.parametrize("which", range(3))
def test_what_is_left_is_measured_whenever_and_whichever_function_is_gone(
    make: Any, tmp_path: Path, which: int, calls_before: int
) -> None:
    """Also the one that iterations begin with, and before it is known how calls follow one another."""
    make()
    functions = [FakeFunction() for _ in range(3)]
    members = grouped(functions, tmp_path)
    calls = [one.served(lambda inputs: None) for one in members]
    for number in range(calls_before):
        calls[number % 3]([])
    del functions[which], members[which], calls[which]
    gc.collect()
    called_in_turn(calls, 700)
    report = members[0].describe()
    assert (report.state, report.functions) == ("decided", 2), report


def test_times_of_a_function_that_went_while_its_group_had_made_way_do_not_count(make: Any, tmp_path: Path) -> None:
    make()
    functions = [FakeFunction() for _ in range(2)]
    members = grouped(functions, tmp_path)
    calls = [one.served(lambda inputs: None) for one in members]
    called_in_turn(calls, 40)
    assert sum(one.calls for one in members[0].describe().candidates) > 10
    members[0].group.give_way()
    del functions[1], members[1]
    gc.collect()
    called_in_turn(calls[:1], 2)
    assert members[0].describe().state == "measuring"
    assert sum(one.calls for one in members[0].describe().candidates) == 0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration that does not begin is given up after 100 calls."""
    monkeypatch.setattr(leading, "MOST_NOT_BEGUN", 100)
    monkeypatch.setattr(leading, "MOST_NOT_BEGUN_EACH", 50)


def test_a_group_whose_first_function_is_called_no_more_is_not_measured_for_ever(
    make: Any, cuda_on_cpu: CudaOnCpu, impatient: None
) -> None:
    """Nor do its calls pile up, or stay with whoever's turn it was."""
    prices, first, second = pair(make, cuda_on_cpu)
    run_pair(first, second, 60)
    assert selection(first).state == "measuring"
    run(second, 110)
    assert selection(second).state in ("waiting", "measuring")
    before = prices.counted()
    run(second, 10)
    assert prices.counted()[0] == before[0], "as without selection"
    run(second, 1200)
    report = selection(second)
    assert report.state == "off"
    assert report.reason == f"measuring began 9 times: {NOT_LED}"
    assert optimizations.settled()


def test_a_first_function_that_comes_back_is_measured(make: Any, cuda_on_cpu: CudaOnCpu, impatient: None) -> None:
    _, first, second = pair(make, cuda_on_cpu)
    run_pair(first, second, 60)
    run(second, 250)
    run_pair(first, second, 500)
    assert (selection(first).state, selection(first).functions) == ("decided", 2)


def test_what_a_group_has_cost_counts_when_a_late_function_takes_it_in(make: Any, tmp_path: Path) -> None:
    """A function for each size, all of which read what one returns: each new one is measured with those before."""
    make()
    settings = Settings("measure", rules=RULES, store=VerdictStore(tmp_path / "none"))
    settings.compile_s = 1.0
    functions = [FakeFunction() for _ in range(12)]
    members: list[Member] = []
    calls: list[Any] = []
    charged, spent = [0.0], [0]
    for number, function in enumerate(functions):
        members.append(Member(function, settings, 0))  # type: ignore[arg-type]
        calls.append(members[-1].served(lambda inputs: None))
        if number:
            members[-1].reads_results_of(members[:1])
            assert members[0].describe().calls == spent[-1], "what was measured before is told"
        called_in_turn(calls, 60)
        assert members[0].describe().state == "measuring"
        members[0].group.give_way()  # it is charged then
        charged.append(settings.excess_s)
        spent.append(members[0].describe().calls)
    assert all(after > before for before, after in itertools.pairwise(spent))
    assert all(after >= before for before, after in itertools.pairwise(charged))
    assert settings.excess_s == pytest.approx(members[0].describe().excess_s)


def test_what_a_group_that_is_taken_in_while_it_is_measured_has_cost_is_charged(make: Any, tmp_path: Path) -> None:
    make()
    settings = Settings("measure", rules=RULES, store=VerdictStore(tmp_path / "none"))
    settings.compile_s = 1.0
    one, other = FakeFunction(), FakeFunction()
    first = Member(one, settings, 0)  # type: ignore[arg-type]
    call = first.served(lambda inputs: None)
    called_in_turn([call], 60)
    while not first.describe().excess_s:  # the order of turns goes by its number: the first may be one candidate's
        called_in_turn([call], 1)
    assert first.describe().state == "measuring"
    cost_s = first.describe().excess_s
    assert cost_s > settings.excess_s == 0
    Member(other, settings, 0).reads_results_of([first])  # type: ignore[arg-type]
    assert settings.excess_s == cost_s
    assert first.describe().excess_s == cost_s
    assert first.describe().state == "waiting"


def test_functions_that_come_late_one_after_another_do_not_measure_for_ever(make: Any, tmp_path: Path) -> None:
    prices, _ = make()
    settings = Settings("measure", rules=Rules(most_calls=300), store=VerdictStore(tmp_path / "none"))
    functions = [FakeFunction() for _ in range(12)]
    members: list[Member] = []
    calls: list[Any] = []
    for function in functions:
        members.append(Member(function, settings, 0))  # type: ignore[arg-type]
        calls.append(members[-1].served(lambda inputs: None))
        members[-1].reads_results_of(members[:1])
        called_in_turn(calls, 60)
    assert prices.timed <= 300 + 24 * len(functions), "the last round of each is brought to its end"
