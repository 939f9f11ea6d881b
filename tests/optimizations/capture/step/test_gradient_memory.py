"""A new pool reserves memory for gradients in one block before anything else is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch import nn

from optimizations.capture.step.gradients import SMALL, carves
from optimizations.capture.step.graphed_step import GraphedStep

LARGE, OF_LARGE = 3 * SMALL // 4, 3 * SMALL
"""Elements of float32, and their bytes."""


OPTIONS = [
    ("PYTORCH_ALLOC_CONF", "expandable_segments:True", True),
    ("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8,max_split_size_mb:128", False),
    ("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:[256:1,512:2,>:8]", False),
    ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", False),
]


@pytest.mark.parametrize(("name", "options", "is_carved"), OPTIONS)
def test_allocator_options_may_make_reserved_memory_useless(
    name: str, options: str, is_carved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert carves({}) and carves({name: options}) is is_carved
    monkeypatch.setenv(name, options)
    device, weight = CpuDevice(), nn.Parameter(torch.ones(LARGE))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()

    graphed = GraphedStep(step, device=device)
    for _ in range(5):
        graphed(torch.ones(1))
    assert graphed.report().replays == 2
    assert device.rooms == ([OF_LARGE] if is_carved else [])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large, self.unused = nn.Parameter(torch.ones(LARGE)), nn.Parameter(torch.ones(LARGE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.large * x.sum()).mean()


Optimizer = torch.optim.Optimizer


def nothing(optimizer: Optimizer) -> None:
    pass


def stepped(optimizer: Optimizer) -> None:
    optimizer.step()


def dropped(optimizer: Optimizer) -> None:
    optimizer.zero_grad()


def stepped_and_dropped(optimizer: Optimizer) -> None:
    stepped(optimizer)
    dropped(optimizer)


def zeroed(optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


Use = Callable[[Optimizer], None]


@pytest.mark.parametrize(
    ("before", "first", "last", "room"),
    [
        (nothing, dropped, stepped, OF_LARGE),
        (nothing, nothing, stepped_and_dropped, 2 * OF_LARGE),
        (dropped, nothing, nothing, OF_LARGE),
        (nothing, nothing, nothing, 0),
        (nothing, zeroed, stepped, 0),
    ],
    ids=["dropped first", "dropped last", "dropped outside", "added to", "zeroed"],
)
def test_new_pool_reserves_memory_for_gradients(before: Use, first: Use, last: Use, room: int) -> None:
    """`unused` gets no gradient, which is visible only if it had one before the call."""
    outcomes = []
    for captured in (False, True):
        model, device = Model(), CpuDevice()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> Any:
            first(optimizer)
            loss = model(x)
            loss.backward()
            last(optimizer)
            return loss.detach()

        run = GraphedStep(step, device=device) if captured else step
        sizes = [2] * 6 + [3] * 6  # two recordings, in one pool
        outcomes.append([])
        for index, size in enumerate(sizes):
            before(optimizer)
            outcomes[-1].append(run(torch.full((size,), 0.1 * index)))
        outcomes.append([model.large.detach()])
        if captured:
            assert isinstance(run, GraphedStep)
            assert len(run.report().recordings) == 2 and run.report().refusals == ()
            assert device.rooms == [room]
    for eager, mine in zip(outcomes[:2], outcomes[2:], strict=True):
        assert all(map(torch.equal, eager, mine))
