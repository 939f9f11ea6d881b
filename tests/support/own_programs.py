"""Programs as users name them to `encore run` and `encore explain`: `own_programs:NAME`."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(torch.relu(self.first(x))))


def inference() -> Any:
    return Net().eval(), (torch.randn(16, 32),)


def waits() -> Any:
    time.sleep(2)
    return inference()


def function() -> Any:
    net = Net()
    return (lambda x, scale: net(x) * scale), (torch.randn(16, 32),), {"scale": 2.0}


def training(dropout: float = 0.0) -> Any:
    model = Net(dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(batch: Any) -> torch.Tensor:
        x, labels = batch
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step, [(torch.randn(16, 32), torch.randint(0, 8, (16,))) for _ in range(3)]


def training_with_dropout() -> Any:
    return training(0.3)


def with_options() -> Any:
    return SimpleNamespace(
        module=Net(),
        args=(torch.randn(16, 32),),
        loss=lambda output: output.square().mean(),
        tolerance=0.25,
        dtype="amp-bf16",
        inputs=lambda index: (torch.full((16, 32), float(index)),),
    )


def computes_something_else_each_time() -> Any:
    calls = itertools.count()
    return (lambda x: x * 3.0 ** next(calls)), (torch.randn(16, 32),), {}


def with_wrong_shapes() -> Any:
    return Net(), (torch.randn(16, 31),)


def returns_a_number() -> int:
    return 3


def with_unknown_dtype() -> Any:
    return {"module": Net(), "args": (torch.randn(1, 32),), "dtype": "int3"}


def with_unknown_name() -> Any:
    return {"module": Net(), "args": (torch.randn(1, 32),), "tolerence": 1e-3}


def with_no_batch() -> Any:
    return (lambda batch: batch), []


class ReadsAValue(nn.Module):
    """The number of iterations depends on a value, which is unknown until it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1 : 1 + int(x.sum().item())]:
            x = layer(x)
        return x


def reads_a_value() -> Any:
    return ReadsAValue(), (torch.randn(4, 8),)


class StepObject:
    """A trainer whose model and optimizer are attributes."""

    def __init__(self) -> None:
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


def trainer() -> Any:
    return {"step": StepObject().step, "batches": [torch.randn(16, 32)]}


def function_of_two() -> Any:
    return (lambda x, y: torch.relu(x @ y)), (torch.randn(16, 16), torch.randn(16, 16))


def forward_alone() -> Any:
    """A function of one argument, which could be a training step, and runs no backward."""
    model = Net()
    return (lambda x: model(x)), (torch.randn(4, 32),)


def recurrent() -> Any:
    """Dynamo leaves recurrent layers to Python, and there cuDNN needs a GPU."""
    return nn.Sequential(nn.Linear(8, 8), nn.GRU(8, 8)), (torch.randn(3, 2, 8),)
