"""Training loops under `graph_step` do what they do without it, bit for bit, and are replayed as promised."""

from __future__ import annotations

import pytest
import torch
from graphs_on_cpu import CpuDevice
from step_parts import outcome
from step_programs import PROGRAMS

from optimizations.capture.step.graphed_step import GraphedStep


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_training_loop_is_replayed_and_gives_the_results_of_eager(name: str) -> None:
    eager = PROGRAMS[name]("cpu")
    expected = outcome(eager, eager.step)
    made, device = PROGRAMS[name]("cpu"), CpuDevice()
    step = GraphedStep(made.step, device=device)
    found = outcome(made, step)
    report = step.report()
    assert report.refusals == ()
    assert len(found) == len(expected)
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(mine, theirs), f"tensor {index}"
    assert (report.replays, len(report.recordings)) == (made.replays, made.recordings)
    assert sum(graph.replays for graph in device.graphs) == made.replays
    assert device.broken == 0
