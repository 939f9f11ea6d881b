"""Callables, and steps, on a GPU: memory of micro-batches, random programs, kernels tuned in first runs, and FP8."""

from __future__ import annotations

from typing import Any

import callable_programs
import pytest
import torch
import triton
import triton.language as tl
from callable_programs import differences, drawn, outcome
from fp8_page import STEPS, program, trained
from step_parts import batches, loss_of, network, unaudited
from torch import nn

import encore
import optimizations
from tests.optimizations.capture.step.test_first_runs import training

pytestmark = pytest.mark.gpu


@pytest.mark.alone
def test_micro_batches_never_live_together_share_graphs() -> None:
    def reserved(order: list[int]) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        module = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)]).cuda()
        call = optimizations.graph_callables(module, [torch.randn(8192, 512, device="cuda")], order=order)
        held = torch.cuda.memory_reserved() - before
        call.close()
        return held

    one, apart, together = (reserved(order) for order in ([1, -1], [1, -1] * 4, [1] * 4 + [-1] * 4))
    print(f"reserved for 1, 4 in turn, 4 at once: {one / 2**20:.0f}, {apart / 2**20:.0f}, {together / 2**20:.0f} MiB")
    assert apart < 0.6 * together
    assert apart < 2 * one


PROGRAMS = 60
TOLERANCE = 1e-4
"""Sums over rows are not always added in one order."""


BEHIND_CYCLES = 2_000_000
"""About a millisecond: a few calls."""


@pytest.mark.filterwarnings("ignore:callable .* runs without its graphs")
def test_random_programs_equal_uncaptured_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device runs later than the host, by more than an iteration."""
    iteration = callable_programs._Running._iteration

    def late(running: Any, actions: list[str]) -> None:
        iteration(running, actions)
        torch.cuda._sleep(BEHIND_CYCLES)

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


# Steps and callables autotune kernels and compile code in their first runs only.


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


@pytest.mark.draws
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


@pytest.mark.draws
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


@pytest.mark.draws
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


# FP8 training with delayed scaling, as docs/fp8.md has it: as a step and as callables, against eager.

needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no FP8 on this GPU"
)


@needs_fp8
def test_step_in_fp8_has_eagers_losses() -> None:
    page, steps = program(), list[Any]()

    def graphed(model: Any, optimizer: Any) -> Any:
        steps.append(encore.graph_step(page.training_step(model, optimizer)))
        return steps[0]

    check(trained(page, "cuda", page.training_step), trained(page, "cuda", graphed))
    assert steps[0].report().replays >= STEPS - 4, steps[0].report()


@needs_fp8
def test_callables_in_fp8_have_eagers_losses() -> None:
    page, layers = program(), list[Any]()

    def graphed(model: Any, optimizer: Any) -> Any:
        layers.append(encore.graph_callables(list(model)))
        return page.training_step(model, optimizer, encore.graph_step(page.update_scales))

    check(trained(page, "cuda", page.training_step), trained(page, "cuda", graphed))
    report = layers[0].report()
    assert report and not any(one.without_graph for one in report), report


def check(expected: Any, found: Any) -> None:
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]))
    torch.testing.assert_close(found[1], expected[1])
