"""The random programs of `callable_programs` on a GPU."""

from __future__ import annotations

from typing import Any

import callable_programs
import pytest
import torch
from callable_programs import differences, drawn, outcome

import optimizations

pytestmark = pytest.mark.gpu

PROGRAMS = 60
TOLERANCE = 1e-4
"""Sums over rows are not always added in one order."""


BEHIND_CYCLES = 2_000_000
"""About a millisecond: a few calls."""


@pytest.mark.filterwarnings("ignore:callable .* runs without its graphs")
@pytest.mark.parametrize("behind", [False, True], ids=["", "behind"])
def test_random_programs_do_what_they_do_without_graphs(behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`behind`: the device comes to what is done between iterations when the host is through with that."""
    iteration = callable_programs._Running._iteration

    def late(running: Any, actions: list[str]) -> None:
        iteration(running, actions)
        torch.cuda._sleep(BEHIND_CYCLES)

    if behind:
        monkeypatch.setattr(callable_programs._Running, "_iteration", late)
    replays = 0
    for seed in range(PROGRAMS):
        expected, _ = outcome(seed, "cuda", None)
        found, group = outcome(seed, "cuda", optimizations.graph_callables)
        assert not list(differences(found, expected, tolerance=TOLERANCE)), (seed, drawn(seed))
        replays += sum(one.replays for one in group.report())
        group.close()
    torch.cuda.synchronize()
    assert replays > 10 * PROGRAMS
