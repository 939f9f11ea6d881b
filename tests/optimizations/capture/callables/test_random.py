"""Random programs over graphed callables compute what they compute without graphs, bit for bit."""

from __future__ import annotations

from functools import partial

import pytest
from callable_programs import differences, drawn, outcome
from simulated_gpu.operators import CpuDevice

from optimizations.capture.callables.graph_callables import graph_callables

PROGRAMS = 30


@pytest.mark.filterwarnings("ignore:callable .* runs without its graphs")
def test_random_programs_do_what_they_do_without_graphs() -> None:
    replays = without = 0
    for seed in range(PROGRAMS):
        expected, _ = outcome(seed, "cpu", None)
        found, group = outcome(seed, "cpu", partial(graph_callables, device=CpuDevice()))
        assert not list(differences(found, expected)), (seed, drawn(seed))
        replays += sum(one.replays for one in group.report())
        without += group.calls_without_graph
    assert replays > 10 * PROGRAMS
    assert without < replays
