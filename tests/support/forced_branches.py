"""Serve graphs by branches from the first race on, whatever the times are: for tests of results.

`ENCORE_TEST_CONCURRENCY=branches` requests it in tests on a GPU, in the fuzzer on a GPU and in the judges;
`ENCORE_TEST_CONCURRENCY=auto` lets times decide.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from optimizations.concurrency.branches import BRANCHES

VARIABLE = "ENCORE_TEST_CONCURRENCY"


class BranchesAtOnce:
    """A race that the branches win in its first call."""

    def __init__(self, alternatives: Sequence[str]) -> None:
        assert BRANCHES in alternatives
        self.winner: str | None = None
        self.median_us: dict[str, float] = {}

    def run(self, call: Callable[[str], tuple[Any, Any]]) -> Any:
        result, _ = call(BRANCHES)
        self.winner = BRANCHES
        return result


def concurrency() -> str:
    """Return the option `concurrency` that the environment requests."""
    requested = os.environ.get(VARIABLE, "off")
    return "auto" if requested == BRANCHES else requested


def force_if_asked(patch: Callable[[Any, str, Any], object] = setattr) -> None:
    """Let branches win all races, and race at once, where the environment requests it. `patch` sets an attribute.

    It is for compiled functions, and for steps and callables without the option.
    """
    if os.environ.get(VARIABLE) == BRANCHES:
        from optimizations.capture import device
        from optimizations.concurrency import launch_log
        from optimizations.in_place import budget
        from optimizations.trees import node

        patch(node, "Race", BranchesAtOnce)
        patch(device, "Race", BranchesAtOnce)
        patch(launch_log, "LEAST_WIDTH", 0.0)
        patch(budget, "MOST_WORK", 1e9)
        patch(budget, "FEWEST_REPLAYS", 1)
        patch(budget, "FEWEST_BEFORE_A_RACE", 1)
