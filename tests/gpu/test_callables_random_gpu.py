"""The random programs of `callable_programs` on a GPU."""

from __future__ import annotations

import pytest
import torch
from callable_programs import differences, drawn, outcome

import optimizations

pytestmark = pytest.mark.gpu

PROGRAMS = 60
TOLERANCE = 1e-4
"""Sums over rows are not always added in one order."""


@pytest.mark.filterwarnings("ignore:callable .* runs without its graphs")
def test_random_programs_do_what_they_do_without_graphs() -> None:
    replays = 0
    for seed in range(PROGRAMS):
        expected, _ = outcome(seed, "cuda", None)
        found, group = outcome(seed, "cuda", optimizations.graph_callables)
        assert not list(differences(found, expected, tolerance=TOLERANCE)), (seed, drawn(seed))
        replays += sum(one.replays for one in group.report())
        group.close()
    torch.cuda.synchronize()
    assert replays > 10 * PROGRAMS
