"""Gradients from before a call that runs as it is: it lets go of them where eager does."""

from __future__ import annotations

import array
import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches, loss_of, network
from torch.multiprocessing.reductions import StorageWeakRef

from optimizations.capture.step.earlier_gradients import EarlierGradients
from optimizations.capture.step.graphed_step import GraphedStep


@pytest.mark.parametrize(
    ("kept_before", "read", "kept", "expected"),
    [
        (False, False, False, True),
        (False, True, False, False),
        (False, False, True, False),
        (True, False, True, True),  # of what others hold nothing is known
    ],
)
def test_call_releases_gradients_it_neither_reads_nor_keeps(
    kept_before: bool, read: bool, kept: bool, expected: bool
) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    outside = {parameter.grad.untyped_storage().data_ptr()} if read else set()
    held = [parameter.grad] if kept_before else []
    earlier = EarlierGradients([parameter.grad])
    held += [parameter.grad] if kept and not held else []
    parameter.grad = None
    assert earlier.dropped([None], outside) is expected
    assert len(held) == kept


def test_gradients_without_storage_are_not_released() -> None:
    assert not EarlierGradients([None]).dropped([None], set())
    assert not EarlierGradients([torch.ones(3).to_sparse()]).dropped([None], set())


def test_gone_or_replaced_gradients_are_told_from_present_ones() -> None:
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    first.grad, second.grad = torch.ones(3), torch.ones(3)
    place, stays = first.grad.untyped_storage().data_ptr(), second.grad.untyped_storage().data_ptr()
    before = [first.grad, second.grad, None]
    earlier = EarlierGradients(before)
    assert before == [] and earlier.places == {place, stays}
    assert not earlier.gone(place)
    assert not earlier.replaced([first.grad, second.grad, None])
    assert earlier.replaced([first.grad, second.grad, torch.ones(1)])
    first.grad = None
    assert earlier.gone(place) and not earlier.gone(stays) and not earlier.gone(1)
    assert earlier.replaced([None, second.grad, None])
    assert not earlier.dropped([None, second.grad, None], set())


@pytest.mark.parametrize("refused", [False, True])
def test_no_call_holds_gradients_that_the_step_has_let_go_of(refused: bool) -> None:
    """Calls that warm up, that are observed, and that are refused; in a capture those that are set aside are empty."""
    model = network("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    there: list[Any] = []
    held = array.array("i", [0, 0])  # what a step writes in one is not noticed

    def look() -> None:
        held[0] += 1
        held[1] += sum(not one.expired() for one in there[0]) if there else 0

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            look()
            return gradient

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        if refused and bool(loss > 0):
            loss = loss * 1.0
        Looks.apply(loss).backward()
        optimizer.step()
        return loss.detach()

    call = GraphedStep(step, device=CpuDevice())
    for args in batches("cpu", 8 if refused else 3):
        there[:] = [[StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters() if p.grad is not None]]
        with warnings.catch_warnings(record=refused):
            call(*args)
    assert call.report().eager_calls == held[0] and held[1] == 0
    assert bool(call.report().refusals) is refused


def test_side_stream_may_read_gradients_the_step_releases() -> None:
    """Another thread gets memory of the program's own stream: of a gradient that the side stream has still to read."""
    model = network("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    told: list[Any] = []
    seen = array.array("i", [0, 0])

    class Streams(CpuDevice):
        @contextlib.contextmanager
        def warming_up(self) -> Iterator[None]:
            with super().warming_up():
                yield
                told.clear()

        def may_read(self, tensors: Iterable[torch.Tensor | None]) -> None:
            assert not told
            told.extend([StorageWeakRef(one.untyped_storage()) for one in tensors if one is not None])

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            there = [StorageWeakRef(one.grad.untyped_storage()) for one in model.parameters() if one.grad is not None]
            seen[0] += len(there)
            seen[1] += len([one for one in there if one.cdata in [other.cdata for other in told]])
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = Looks.apply(loss_of(model, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    call = GraphedStep(step, device=Streams())
    for args in batches("cpu", 3):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        call(*args)
    assert list(seen) == [12, 12]


def test_memory_that_a_gradient_shared_keeps_its_name() -> None:
    """The gradient is gone, and its memory is another tensor's, too: as of two that were made of one array."""
    model, array_there = network("cpu"), numpy.zeros((16, 8), "float32")
    optimizer, there = torch.optim.SGD(model.parameters(), lr=0.05), torch.from_numpy(array_there)

    def step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), there.abs().sum()

    call = GraphedStep(step, device=CpuDevice())
    for index, args in enumerate(batches("cpu")):
        array_there[...] = index
        model[0].weight.grad = torch.from_numpy(array_there)
        _, size = call(*args)
        assert size == torch.from_numpy(abs(array_there)).sum()
    assert call.report().replays == 6


class OfAKind(torch.Tensor):
    """A class of the program's own for gradients."""


def test_gradients_of_other_classes_are_refused() -> None:
    """The program puts others there before each call, and the step adds to them."""
    losses = []
    for graphed in (False, True):
        model = network("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(batch: dict[str, torch.Tensor], model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = GraphedStep(step, device=CpuDevice()) if graphed else step
        generator, moved = torch.Generator().manual_seed(3), []
        for args in batches("cpu"):
            for parameter in model.parameters():
                moved.append(torch.randn(parameter.shape, generator=generator).as_subclass(OfAKind))
                parameter.grad = moved[-1].clone()
            losses.append(call(*args))
    assert torch.equal(torch.stack(losses[:9]), torch.stack(losses[9:]))
    assert isinstance(call, GraphedStep)
    (refusal,) = call.report().refusals
    assert "no plain tensor" in refusal.reason
