"""FP8 training with delayed scaling, as docs/fp8.md has it, is recorded as a step and as callables."""

from __future__ import annotations

from typing import Any

import torch
from fp8_page import STEPS, program, trained
from simulated_gpu.operators import CpuDevice

from optimizations.capture.callables.graph_callables import GraphedCallables
from optimizations.capture.step.graphed_step import GraphedStep


def test_step_with_scales_and_cached_casts_is_replayed() -> None:
    page = program()
    steps: list[GraphedStep] = []

    def graphed(model: Any, optimizer: Any) -> Any:
        steps.append(GraphedStep(page.training_step(model, optimizer), device=CpuDevice()))
        return steps[0]

    expected, state = trained(page, "cpu", page.training_step)
    found, graphed_state = trained(page, "cpu", graphed)
    assert found == expected and sum(expected[-1]) < sum(expected[1])
    torch.testing.assert_close(graphed_state, state, rtol=0, atol=0)
    assert steps[0].report().replays >= STEPS - 4 and not steps[0].report().refusals


def test_callables_with_scales_and_cached_casts_are_replayed() -> None:
    page, layers, device = program(), list[Any](), CpuDevice()

    def graphed(model: Any, optimizer: Any) -> Any:
        layers.append(GraphedCallables(list(model), device=device))
        return page.training_step(model, optimizer, GraphedStep(page.update_scales, device=device))

    expected, state = trained(page, "cpu", page.training_step)
    found, graphed_state = trained(page, "cpu", graphed)
    assert found == expected
    torch.testing.assert_close(graphed_state, state, rtol=0, atol=0)
    report = layers[0].report()
    assert {(one.callable, one.variant) for one in report} == {(1, 0), (1, 1), (2, 0), (3, 0), (3, 1)}
    assert not any(one.without_graph for one in report) and all(one.replays for one in report), report
