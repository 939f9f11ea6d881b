"""Tests of results can serve every graph by branches."""

from __future__ import annotations

from forced_branches import BranchesAtOnce

from optimizations.concurrency.branches import BRANCHES
from tests.optimizations.concurrency.test_branches import INDEPENDENT, branches_of, captured, run_all


def test_branches_win_in_the_first_call() -> None:
    branches, driver, graph = branches_of(INDEPENDENT)
    branches._make_race = BranchesAtOnce
    branches.prepare(captured(2), ())
    assert run_all(branches, calls=1) == [0]
    assert branches.report().decision == BRANCHES
    assert driver.edges == {} and graph.launched_with == set()
