"""Steps and callables on a GPU that autotune kernels and compile code in their first runs only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from step_parts import batches, loss_of, network, unaudited

import optimizations
from tests.optimizations.capture.step.test_first_runs import training

pytestmark = [pytest.mark.gpu, pytest.mark.draws]


@triton.autotune(configs=[triton.Config({"block": size}) for size in (64, 256)], key=["count"])
@triton.jit
def doubled_kernel(source, destination, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """destination = 2 * source."""
    places = tl.program_id(0) * block + tl.arange(0, block)
    there = places < count
    tl.store(destination + places, tl.load(source + places, mask=there) * 2, mask=there)


def doubled(x: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(x)
    doubled_kernel[lambda found: (triton.cdiv(x.numel(), found["block"]),)](x, result, x.numel())
    return result


def test_autotuning_for_each_size_does_not_refuse_a_step() -> None:
    model = network("cuda")
    step = unaudited(training(model, lambda batch: loss_of(model, {**batch, "x": doubled(batch["x"])})))
    for rows in (6, 6, 6, 6, 11, 11, 11, 11, 11, 6, 11):
        step(*batches("cuda", 1, rows)[0])
    report = step.report()
    assert report.refusals == ()
    assert len(report.recordings) == 2
    assert report.replays == 1 + 2 + 2  # of the second size one call was passed over


class Doubled(torch.autograd.Function):
    """`doubled`, with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return doubled(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return doubled(gradients[0])


def test_autotuning_does_not_refuse_callables() -> None:
    sample = torch.randn(1000, device="cuda", requires_grad=True)
    group = optimizations.graph_callables(Doubled.apply, [(sample,)])
    for _ in range(3):
        x = torch.randn(1000, device="cuda", requires_grad=True)
        result = group[0](x)
        result.sum().backward()
        assert torch.equal(result, x * 2) and torch.equal(x.grad, torch.full_like(x, 2))
    assert group.calls_without_graph == 0
    assert [report.replays for report in group.report()] == [3, 3]


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_code_compiled_in_the_first_run_is_captured(mode: str) -> None:
    model = network("cuda", norm=True)
    compiled = torch.compile(model, mode=mode)
    sample = torch.randn(6, 8, device="cuda", requires_grad=True)
    group = optimizations.graph_callables(lambda x: compiled(x), [(sample,)])
    for _ in range(3):
        x = torch.randn(6, 8, device="cuda", requires_grad=True)
        group[0](x).sum().backward()
        assert x.grad is not None and torch.isfinite(x.grad).all()
    assert group.calls_without_graph == 0
    assert [report.replays for report in group.report()] == [3, 3]
