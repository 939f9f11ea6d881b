"""A call that runs uncaptured releases earlier gradients where eager does."""

from __future__ import annotations

import array
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches, loss_of, network
from torch.multiprocessing.reductions import StorageWeakRef

from optimizations.capture.step.graphed_step import GraphedStep


def test_side_stream_may_read_gradients_the_step_releases() -> None:
    """Another thread may reuse a gradient's memory that the side stream has still to read."""
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
