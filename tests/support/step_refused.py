"""Steps that are refused for their arguments and results; `step_refusals` adds others, and holds them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from step_parts import batches, loss_of, made_of, network, training_step
from torch import nn

Batch = dict[str, torch.Tensor]


Step = Callable[..., Any]


@dataclass
class Refused:
    """`step(batch)` changes the parameters of `model`; the reason holds `words`, what to do instead `advice`, and it
    names a line if `line`."""

    step: Step
    model: nn.Module
    words: str
    line: bool = True
    batches: list[tuple[Any, ...]] | None = None
    between: Callable[[int], None] = lambda index: None
    advice: str = ""


REFUSED: dict[str, Callable[[str], Refused]] = {}


def refused(words: str, *, line: bool = True, dropout: float = 0.0, advice: str = "") -> Callable[[Step], Step]:
    """Register a function that makes a step of the parts that its parameters name.

    These are the `device`, a `model`, and a step to `train` it. It returns the step, and what else `Refused`
    takes in a dict.
    """

    def register(make: Step) -> Step:
        def made(device: str) -> Refused:
            model = network(device, dropout=dropout)
            given = {"device": device, "model": model, "train": trained(model)}
            step, more = made_of(make, given)
            return Refused(**{"step": step, "model": model, "words": words, "line": line, "advice": advice, **more})

        REFUSED[make.__name__] = made
        return make

    return register


def trained(model: nn.Module) -> Callable[[Batch], torch.Tensor]:
    train = training_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return lambda batch: train(batch).detach()


@refused("argument 0, which shares memory with argument 1", line=False)
def writes_into_one_of_two_views(device: str, train: Step) -> Any:
    def step(first: torch.Tensor, second: torch.Tensor, batch: Batch) -> torch.Tensor:
        first.mul_(2)
        train(batch)
        return second.sum()

    wholes = [torch.ones(4, 4, device=device) for _ in batches(device)]
    return step, {"batches": [(one[:3], one[1:], *batch) for one, batch in zip(wholes, batches(device), strict=True)]}


@refused("changes argument 0['x'] itself", line=False)
def gradient_of_the_batch(train: Step) -> Step:
    def step(batch: Batch) -> torch.Tensor:
        batch["x"].requires_grad_()
        return train(batch)

    return step


@refused("is given index, which changes on every call", line=False)
def number_that_changes(device: str, train: Step) -> Any:
    calls = [(*batch, index) for index, batch in enumerate(batches(device, 70))]
    return lambda batch, index: train(batch) * index, {"batches": calls}


@refused("returns something else than a tensor that differs from call to call", line=False)
def returns_a_new_object(train: Step) -> Step:
    return lambda batch: SimpleNamespace(loss=train(batch))


@refused("changes argument 0, a dict that it is given", line=False)
def entry_of_the_batch_replaced(train: Step) -> Step:
    def step(batch: Batch) -> torch.Tensor:
        batch["x"] = batch["x"] * 2
        return train(batch)

    return step


@refused("is given a new object of an unknown kind on every call", line=False)
def batches_of_a_class_that_is_unknown(device: str, train: Step) -> Any:
    class Given:
        def __init__(self, content: Batch) -> None:
            self.content = content

    return lambda batch: train(batch.content), {"batches": [(Given(batch),) for (batch,) in batches(device, 12)]}


class Store(MutableMapping):  # type: ignore[type-arg]
    """Its copies hold what it holds."""

    def __init__(self, content: Batch) -> None:
        self.content = content

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.content[key]

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self.content[key] = value

    def __delitem__(self, key: str) -> None:
        del self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


@refused("argument 0 is a Store", line=False)
def batches_whose_copies_share_what_they_hold(device: str, train: Step) -> Any:
    return train, {"batches": [(Store(batch),) for (batch,) in batches(device)]}


@refused("returns an object of a class of which no copy can be made", line=False)
def results_whose_copies_share_what_they_hold(train: Step) -> Step:
    return lambda batch: Store({"loss": train(batch)})


@dataclass
class Stage:
    factor: float
    before: Stage | None = None


@refused("argument 1 is a Stage", line=False)
def a_dataclass_that_leads_back_to_itself(device: str, train: Step) -> Any:
    stage = Stage(2.0, Stage(1.0))
    stage.before.before = stage  # type: ignore[union-attr]
    return lambda batch, stage: train(batch) * stage.factor, {"batches": [(*one, stage) for one in batches(device)]}


class Looked(nn.Module):
    """Its activation, of which the program reads the gradient after the step."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner = network(device)
        self.last = nn.Linear(4, 4).to(device)
        self.hidden: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        self.hidden = self.inner(x)
        self.hidden.retain_grad()
        return self.last(self.hidden)


@refused("has a gradient (`.grad`)", line=False)
def attribute_with_a_gradient(device: str) -> Any:
    model = Looked(device)
    return trained(model), {"model": model}


@refused("backward has not run", line=False)
def backward_outside(model: nn.Module) -> Step:
    return lambda batch: loss_of(model, batch)
