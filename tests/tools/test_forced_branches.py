"""Tests of results can serve every graph by branches."""

from __future__ import annotations

import inspect

import pytest
from forced_branches import VARIABLE, BranchesAtOnce, concurrency, force_if_asked

import optimizations
from optimizations.capture import device
from optimizations.concurrency.branches import BRANCHES
from optimizations.in_place import budget
from optimizations.options import CONCURRENCY
from optimizations.trees import node
from tests.optimizations.concurrency.test_branches import INDEPENDENT, branches_of, captured, run_all


def test_branches_win_in_the_first_call() -> None:
    branches, driver, graph = branches_of(INDEPENDENT)
    branches._make_race = BranchesAtOnce
    branches.prepare(captured(2), ())
    assert run_all(branches, calls=1) == [0]
    assert branches.report().decision == BRANCHES
    assert driver.edges == {} and graph.launched_with == set()


@pytest.mark.parametrize(("asked", "option"), [(None, "off"), ("auto", "auto"), ("branches", "auto")])
def test_environment_chooses_the_option(monkeypatch: pytest.MonkeyPatch, asked: str | None, option: str) -> None:
    if asked is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, asked)
    race, fewest = node.Race, budget.FEWEST_REPLAYS
    force_if_asked(monkeypatch.setattr)
    assert concurrency() == option
    assert node.Race is device.Race is (BranchesAtOnce if asked == BRANCHES else race)
    for function in (optimizations.graph_step, optimizations.graph_callables):
        default = inspect.signature(function).parameters["concurrency"].default
        assert default == ("auto" if asked == BRANCHES else CONCURRENCY)
    assert (fewest != budget.FEWEST_REPLAYS) is (asked == BRANCHES)
