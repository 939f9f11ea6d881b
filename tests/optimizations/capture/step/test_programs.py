"""Training loops under `graph_step` do what they do without it, bit for bit, and are replayed as promised."""

from __future__ import annotations

import pytest
import torch
from library_programs.record import programs as library_programs
from simulated_gpu.operators import CpuDevice
from step_parts import Program, batches, loss_of, network, outcome, state_of
from step_programs import PROGRAMS
from torch.func import functional_call, jvp

from optimizations.capture.step.graphed_step import GraphedStep


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_training_loop_is_replayed_with_eagers_results(name: str) -> None:
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


LIBRARY = (
    "sac_with_three_optimizers_and_tuned_temperature",
    "moco_queue_pointer_on_the_device",
    "sam_adaptive_in_place",
    "maml_second_order_inner_loop",
)
"""Of the programs that a GPU compares: policies and slow copies, rings of keys, second derivatives."""


@pytest.mark.parametrize("name", LIBRARY)
def test_library_program_has_eagers_results(name: str) -> None:
    make = library_programs()[name]
    eager, made = make("cpu"), make("cpu")
    expected = outcome(eager, eager.step)
    step = GraphedStep(made.step, device=CpuDevice())
    assert all(map(torch.equal, outcome(made, step), expected))
    assert step.report().refusals == () and step.report().replays >= len(made.batches) - 5


def regularised_by_a_derivative() -> Program:
    model = network("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        held = dict(model.named_parameters())
        x = batch["x"]
        _, tangent = jvp(lambda given: functional_call(model, held, (given,)), (x,), (torch.ones_like(x),))
        loss = loss_of(model, batch) + tangent.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Program(step, batches("cpu"), lambda: state_of(model, optimizer))


def test_zero_tangents_without_memory_become_none() -> None:
    """Forward-mode differentiation makes such tangents for values that do not depend on the input."""
    eager, made = regularised_by_a_derivative(), regularised_by_a_derivative()
    expected = outcome(eager, eager.step)
    step = GraphedStep(made.step, device=CpuDevice())
    assert all(map(torch.equal, outcome(made, step), expected))
    assert (step.report().refusals, step.report().replays) == ((), made.replays)
