"""Functions of a group that are gone, or called no more: what is left is measured, and nothing goes on for ever."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from selection_on_cpu import make, pair, run, run_pair, selection
from test_selection_groups import FakeFunction, called_in_turn, grouped

import optimizations
from optimizations.selection import leading
from optimizations.selection.group import NOT_LED

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


def test_a_group_whose_first_function_is_called_no_more_is_not_measured_for_ever(
    make: Any, cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do its calls pile up, or stay with whoever's turn it was."""
    monkeypatch.setattr(leading, "MOST_NOT_BEGUN", 100)
    monkeypatch.setattr(leading, "MOST_NOT_BEGUN_EACH", 50)
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


def test_a_first_function_that_comes_back_is_measured(
    make: Any, cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "MOST_NOT_BEGUN", 100)
    monkeypatch.setattr(leading, "MOST_NOT_BEGUN_EACH", 50)
    _, first, second = pair(make, cuda_on_cpu)
    run_pair(first, second, 60)
    run(second, 250)
    run_pair(first, second, 500)
    assert (selection(first).state, selection(first).functions) == ("decided", 2)
