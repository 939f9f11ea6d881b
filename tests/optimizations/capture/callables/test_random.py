"""Random programs over graphed callables compute what they compute without graphs, bit for bit."""

from __future__ import annotations

from functools import partial

import pytest
from callable_programs import differences, drawn, give_from_the_first, outcome
from simulated_gpu.operators import CpuDevice

from optimizations.capture.callables.graph_callables import graph_callables

PROGRAMS = 80


@pytest.mark.filterwarnings("ignore:callable .* runs without its graphs")
@pytest.mark.filterwarnings("ignore:gradients of callable .* stay where its graphs write them")
@pytest.mark.parametrize("gives", [False, True])
def test_random_programs_do_what_they_do_without_graphs(gives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where gradients are given away from the first backward on, whatever becomes of them."""
    if gives:
        give_from_the_first(monkeypatch)
    replays = without = 0
    for seed in range(PROGRAMS):
        expected, _ = outcome(seed, "cpu", None)
        found, group = outcome(seed, "cpu", partial(graph_callables, device=CpuDevice()))
        assert not list(differences(found, expected)), (seed, drawn(seed))
        replays += sum(one.replays for one in group.report())
        without += group.calls_without_graph
    assert replays > 10 * PROGRAMS
    assert without < replays
