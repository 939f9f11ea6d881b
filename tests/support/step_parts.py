"""Make programs for the tests of whole-step captures from a network, batches and a step, and run them.

A program makes everything from its own seed, so that two of a kind do the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from models.nests import tensors_of
from optimizations.capture.step.graphed_step import GraphedStep

CALLS = 9
CAPTURE_CHECK = "_accelerator_graph_capture_health_check"
"""Method of `torch.optim.Optimizer` since PyTorch 2.10. It raises in a capture where a group is not `capturable`."""


def unaudited(step: Callable[..., Any], **options: Any) -> Any:
    """Return a step of which no call is audited, for tests that count replays."""
    import optimizations

    return optimizations.graph_step(step, check_every=None, **options)


Graph = Callable[..., Any]
"""Returns the step, graphed or as it is."""


def graphed(step: Callable[..., Any], device: Any = None, **options: Any) -> GraphedStep:
    """Return a step whose graphs are on the simulated device."""
    from simulated_gpu.operators import CpuDevice

    return GraphedStep(step, device=device or CpuDevice(), **options)


def assert_as_eager(program: Callable[[Graph], Iterable[Any]], device: Any = None, **options: Any) -> Any:
    """Run a program with its step as it is, and with graphs: all that it yields must be equal.

    Return the report of the graphed step.
    """
    steps: list[GraphedStep] = []

    def graph(step: Callable[..., Any]) -> GraphedStep:
        steps.append(graphed(step, device, **options))
        return steps[-1]

    def copied(one: Any) -> Any:  # no variable holds what the program gives while it goes on
        return one.detach().clone() if isinstance(one, torch.Tensor) else one

    expected, found = (list(map(copied, program(way))) for way in (lambda step: step, graph))
    assert len(found) == len(expected)
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        equal = torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs
        assert equal, f"number {index}: {mine}, in eager mode {theirs}"
    return steps[-1].report()


@dataclass
class Program:
    """`step(*batch)` is called for each of `batches`, `between(index)` after each call.

    `around_all` and `around_each` make context managers that surround the calls.
    """

    step: Callable[..., Any]
    batches: list[tuple[Any, ...]]
    state: Callable[[], Iterable[torch.Tensor]]
    between: Callable[[int], None] = lambda index: None
    replays: int = CALLS - 3
    recordings: int = 1
    around_all: Callable[[], AbstractContextManager[Any]] = nullcontext
    around_each: Callable[[], AbstractContextManager[Any]] = nullcontext


PROGRAMS: dict[str, Callable[[str], Program]] = {}


def program(make: Callable[[str], Program], name: str | None = None) -> Callable[[str], Program]:
    PROGRAMS[name or make.__name__] = make
    return make


def network(device: str, *, dropout: float = 0.0, norm: bool = False) -> nn.Module:
    torch.manual_seed(7)
    middle: list[nn.Module] = [nn.BatchNorm1d(16)] if norm else []
    middle += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.GELU(), nn.Linear(16, 4)).to(device)


def batches(device: str, count: int = CALLS, rows: int = 6) -> list[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(11)
    return [
        (
            {
                "x": torch.randn(rows, 8, generator=generator).to(device),
                "y": torch.randint(4, (rows,), generator=generator).to(device),
            },
        )
        for _ in range(count)
    ]


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).float(), batch["y"])


def descend(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Update the parameters once: no gradients, backward, step. Return the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, zero: Callable[[], None] | None = None
) -> Callable[..., torch.Tensor]:
    """The plainest step of training. It gives the loss of a batch. `zero` stands for `optimizer.zero_grad`."""
    zero = zero or optimizer.zero_grad

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        zero()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        for kept in optimizer.state.values():
            tensors += [value for value in kept.values() if isinstance(value, torch.Tensor)]
    return tensors


def made_of(make: Callable[..., Any], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Call a function with the parts that its parameters name. Return its step, and what else it returns."""
    found = make(**{name: given[name] for name in inspect.signature(make).parameters})
    return found if isinstance(found, tuple) else (found, {})


def loop(
    *,
    dropout: float = 0.0,
    norm: bool = False,
    calls: int = CALLS,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    options: Mapping[str, Any] = MappingProxyType({"lr": 0.1}),
    **facts: Any,
) -> Callable[[Callable[..., Any]], Callable[[str], Program]]:
    """Register a loop around a network and an optimizer, plain SGD by default, and the `facts` of its `Program`.

    The parameters of its function name `device`, `model`, `optimizer`, and the plainest step to `train` it. It returns
    the step, or that and what else `Program` takes in a dict.
    """

    def register(make: Callable[..., Any]) -> Callable[[str], Program]:
        def made(device: str) -> Program:
            model = network(device, dropout=dropout, norm=norm)
            optimizer = make_optimizer(model.parameters(), **options)
            given = {"device": device, "model": model, "optimizer": optimizer, "train": training_step(model, optimizer)}
            step, more = made_of(make, given)
            of = {"batches": batches(device, calls), "state": lambda: state_of(model, optimizer), **facts, **more}
            return Program(step, **of)

        return program(made, make.__name__)

    return register


@loop()
def sgd(train: Callable[..., Any]) -> Callable[..., Any]:
    return train


def outcome(made: Program, step: Callable[..., Any]) -> list[torch.Tensor]:
    """Everything a program returned, kept until the end, and its state there."""
    torch.manual_seed(3)
    kept: list[Any] = []
    with made.around_all():
        for index, batch in enumerate(made.batches):
            with made.around_each():
                kept.append(step(*batch))
            made.between(index)
    return [one.detach() for one in tensors_of([kept, list(made.state())])]
