"""Calls in inference mode, whose tensors have no version counters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches, loss_of, network

from optimizations.capture.inputs import CopiedInputs
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.written_memory import Writes


def adds(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache.add_(x.sum(0))
    return cache.square().sum()


@pytest.mark.parametrize("made_in_it", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_writes_to_arguments_reach_the_caller(made_in_it: bool, count: int) -> None:
    """With one cache it is the same tensor in each call."""

    def run(step: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        with torch.inference_mode(made_in_it):
            caches = [torch.zeros(8) for _ in range(count)]
        with torch.inference_mode():
            sums = [step(caches[index % count], batch["x"]) for index, (batch,) in enumerate(batches("cpu", 12))]
        return [*sums, *caches]

    graphed = GraphedStep(adds, device=CpuDevice())
    for mine, theirs in zip(run(graphed), run(adds), strict=True):
        assert torch.equal(mine, theirs)
    assert graphed.report().replays >= 12 - 4


def test_written_inference_argument_runs_uncaptured() -> None:
    with torch.inference_mode():
        total = torch.zeros(2, 8)

    def step(row: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum(0))
        return (total * row).sum()

    def run(step: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        with torch.inference_mode():
            total.zero_()
            calls = [
                (batch["x"], total[index % 2] if index > 6 else batch["x"][0]) for index, (batch,) in enumerate(calls_)
            ]
            return [step(row, x) for x, row in calls]

    calls_ = batches("cpu", 12)
    expected = run(step)
    graphed = GraphedStep(step, device=CpuDevice())
    assert all(map(torch.equal, run(graphed), expected))
    assert graphed.report().replays == 4


def test_compiled_code_is_assumed_to_write_mutable_inputs() -> None:
    with torch.inference_mode():
        one, expanded = torch.zeros(3), torch.zeros(1).expand(3)
    plain = torch.zeros(3)
    writes = Writes([one, expanded, plain], compiled=False)
    assert not any(map(writes.include, (one, expanded, plain)))
    compiled = Writes([one, expanded, plain], compiled=True)
    assert [*map(compiled.include, (one, expanded, plain))] == [True, False, False]
    plain.add_(1)
    writes.note(one.view(3, 1))
    assert [*map(writes.include, (one, expanded, plain))] == [True, False, True]


def test_placeholders_are_of_the_kind_of_the_inputs() -> None:
    plain = torch.ones(3)
    with torch.inference_mode():
        made = torch.ones(3)
        kinds = [one.is_inference() for one in CopiedInputs([plain, made]).recording_inputs]
    assert kinds == [False, True]
    assert not CopiedInputs([made]).recording_inputs[0].is_inference()


def test_learning_rate_may_first_change_in_inference_mode() -> None:
    model = network("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(batch: dict[str, torch.Tensor], train: bool) -> torch.Tensor:
        loss = loss_of(model, batch)
        if train:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()

    graphed = GraphedStep(step, device=CpuDevice())
    for index, (batch,) in enumerate(batches("cpu", 20)):
        train = not 6 <= index < 9
        with torch.inference_mode(not train):
            graphed(batch, train)
        optimizer.param_groups[0]["lr"] = 0.1 if index < 5 else 0.05 / index
    report = graphed.report()
    assert report.patched_learning_rates == 1 and report.replays >= 10
