"""Inputs and results of a step are copied around its launch, and equal eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice, copied
from step_parts import batches, network, training_step

from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.observer import storage
from optimizations.capture.step.outputs import Outputs
from optimizations.graph.memory import overlaps

__all__ = ["copied"]


def training(give: Callable[[torch.Tensor], Any] = lambda loss: loss) -> Callable[..., Any]:
    model = network("cpu")
    train = training_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return lambda batch: give(train(batch).detach())


def run(step: Callable[..., Any], calls: list[Any]) -> list[torch.Tensor]:
    """Everything the calls returned, kept until the end."""
    kept = [step(*call) for call in calls]
    return [tensor for found in kept for tensor in (found if isinstance(found, (tuple, list)) else [found])]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one": lambda loss: loss,
    "several, one twice": lambda loss: (loss, loss * 2, loss),
    "a view": lambda loss: torch.stack([loss, loss + 1])[1],
    "not contiguous": lambda loss: (loss * torch.ones(4, 3)).T,
    "empty": lambda loss: (loss, loss.new_zeros(0, 3)),
    "large": lambda loss: loss * torch.ones(100_000),
    "many": lambda loss: [loss * index for index in range(18)],
    "expanded": lambda loss: (loss * torch.arange(5.0))[:, None].expand(5, 3),
    "expanded, next to others": lambda loss: (loss, (loss * torch.arange(5.0)).expand(3, 5), loss * torch.ones(3)),
    "a column, expanded": lambda loss: (loss * torch.arange(36.0).reshape(6, 6))[:, 1:2].expand(-1, 3),
    "a part of each row": lambda loss: (loss * torch.arange(36.0).reshape(6, 6))[:, 2:4],
    "channels last": lambda loss: (loss * torch.ones(2, 3, 4, 4)).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("kind", sorted(RESULTS))
def test_results_stay_valid_and_have_eagers_layout(kind: str) -> None:
    """An expanded one takes as little memory."""
    calls = batches("cpu")
    expected = run(training(RESULTS[kind]), calls)
    step = GraphedStep(training(RESULTS[kind]), device=CpuDevice())
    found = run(step, calls)
    assert_same(found, expected)
    assert step.report().replays == len(calls) - 3
    assert step.report().refusals == ()
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.stride() == theirs.stride() and mine.storage_offset() in (0, theirs.storage_offset())
        assert mine.untyped_storage().nbytes() <= theirs.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", sorted(RESULTS))
def test_results_are_ordinary_tensors(kind: str) -> None:
    weight = torch.ones((), requires_grad=True)
    step = GraphedStep(lambda x: RESULTS[kind](x.sum()), device=CpuDevice())
    with torch.no_grad():
        found = run(step, [(torch.rand(3),) for _ in range(6)])
    assert step.report().replays
    for result in found[-1:]:
        assert not result._is_view()
        result.detach_()
        if not overlaps(result):
            result.mul_(weight)
            assert result.requires_grad


def test_call_copies_inputs_of_a_dtype_in_one_operation(copied: list[int]) -> None:
    calls = batches("cpu")
    expected = run(training(), calls)
    step = GraphedStep(training(), device=CpuDevice())
    found = run(step, calls[:5])
    copied.clear()
    found += run(step, calls[5:])
    assert_same(found, expected)
    assert copied == [2, 1] * len(calls[5:])


OVERLAPPING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda x: x[:4].expand(3, 4),
    "windows": lambda x: x.as_strided((3, 3), (2, 1)),
    "a column, expanded": lambda x: x.reshape(6, 6)[:, 2:3].expand(-1, 3),
    "a column of a large matrix, expanded": lambda x: (x[:, None] * torch.ones(36, 1000))[:, :1].expand(-1, 5),
}


@pytest.mark.parametrize("kind", sorted(OVERLAPPING))
def test_overlapping_inputs_are_passed(kind: str) -> None:
    graphed = GraphedStep(lambda x: x * 2, device=CpuDevice())
    for _ in range(8):
        x = OVERLAPPING[kind](torch.rand(36))
        assert torch.equal(graphed(x), x * 2)
    assert graphed.report().replays >= 4, graphed.report().refusals


@pytest.mark.parametrize("moves", [False, True])
def test_adjacent_inputs_of_one_tensor_may_be_written(*, moves: bool) -> None:
    """Caches of keys and values are such tensors."""

    def step(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        keys.add_(x)
        values.mul_(0.5).add_(keys)
        return (x * values).sum()

    graphed = GraphedStep(step, device=CpuDevice())
    caches = [torch.ones(2, 3), torch.ones(2, 3)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(7):
        x = torch.randn(3, generator=generator)
        caches = [one.clone() if moves else one for one in caches]
        found, expected = (run_it(x, *cache) for run_it, cache in zip((graphed, step), caches, strict=True))
        assert torch.equal(found, expected) and torch.equal(*caches)
    assert graphed.report().replays == 4


def test_out_of_memory_for_results_ends_the_call_unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that catches this calls again, and must not have its weights changed twice."""
    weight = torch.zeros(200, 200)

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.add_(x)
        return weight * 2

    full = False

    def unless_full(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocating(*arguments: Any, **keywords: Any) -> torch.Tensor:
            if full:
                raise torch.OutOfMemoryError("no memory")
            return allocate(*arguments, **keywords)

        return allocating

    for owner, name in ((torch, "empty_strided"), (torch.Tensor, "clone")):
        monkeypatch.setattr(owner, name, unless_full(getattr(owner, name)))
    graphed, x = GraphedStep(step, device=CpuDevice()), torch.ones(200, 200)
    for count in range(1, 7):
        assert torch.equal(graphed(x), 2 * count * x)
    full = True
    with pytest.raises(torch.OutOfMemoryError):
        graphed(x)
    full = False
    assert torch.equal(graphed(x), 14 * x)
    assert graphed.report().replays == 4


def test_sparse_result_is_copied_out_of_empty_tensors() -> None:
    returned = torch.eye(2).to_sparse()
    outputs = Outputs(returned, [], {storage(torch.empty(0))})
    fresh = outputs.prepare()
    outputs.copy_out(fresh)
    result = outputs.take([], fresh)
    returned._values().zero_()  # as the next launch writes it
    assert torch.equal(result.to_dense(), torch.eye(2))


@pytest.mark.parametrize(
    "result",
    [
        lambda x: x.conj(),
        lambda x: x.mH[1:],
        lambda x: x.conj().imag,
        lambda x: torch._neg_view(torch.view_as_real(x))[0],
    ],
)
def test_lazy_view_of_an_argument_equals_eager(
    result: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    step = GraphedStep(lambda x: (x.abs(), result(x)), device=CpuDevice())
    for index in range(6):
        x = torch.full((2, 2), complex(index, 3))
        (size, found), expected = step(x), result(x)
        assert torch.equal(size, x.abs()) and torch.equal(found, expected)
        assert (found.is_conj(), found.is_neg()) == (expected.is_conj(), expected.is_neg())
        x.add_(1)
        assert torch.equal(found, expected)  # it still lies in the argument's memory
    assert step.report().replays == 3
