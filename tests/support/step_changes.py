"""Training loops in which something of Python's changes between calls: numbers, modes, hooks, objects, shapes.

They belong to the programs of `step_programs`.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from step_parts import Program, batches, loop, loss_of, network, program, state_of, training_step
from torch import nn

Batch = dict[str, torch.Tensor]


@loop(dropout=0.3, norm=True, calls=14, replays=14 - 3 - 2, recordings=2)
def evaluation_in_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """The mode of the model is Python's: a recording for each."""

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if model.training:
            optimizer.step()
        return loss

    return step, {"between": lambda index: model.train(index < 5 or index >= 10)}


@loop(calls=16, options={"lr": 0.01}, replays=3 + 3 + 3, recordings=3)
def gradients_of_layers_that_were_frozen(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    """The gradients are not set to None, so the optimizer continues to use them."""

    def between(index: int) -> None:
        if index == 5:
            model[0].requires_grad_(False)
        if index == 10:
            model[0].weight.grad = None

    return training_step(model, optimizer, zero=lambda: None), {"between": between}


@program
def numbers_of_numpy(device: str) -> Program:
    """An argument and a learning rate, new objects in each call. At the end the argument is 0.0, then -0.0."""
    model = network(device)
    options: Any = {"fused": True, "capturable": device != "cpu"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, **options)
    train = training_step(model, optimizer)

    def step(batch: Batch, factor: Any) -> torch.Tensor:
        return train(batch).detach() * float(factor)

    def between(index: int) -> None:
        optimizer.param_groups[0]["lr"] = numpy.float32(0.5 ** (index + 1))

    factors = [2.0] * 8 + [0.0] * 5 + [-0.0] * 5
    calls = [(batch, numpy.float32(factor)) for (batch,), factor in zip(batches(device, 18), factors, strict=True)]
    return Program(step, calls, lambda: state_of(model, optimizer), between, replays=8 - 4 + 3 + 3, recordings=3)


@loop(calls=14, replays=3 + 3 + 3, recordings=2)
def a_hook_of_a_module_is_exchanged(model: Any, train: Any) -> Any:
    """The number of hooks stays the same. Later the first hook is registered again."""

    def double(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
        return result * 2

    hooks = [model[0].register_forward_hook(double)]

    def between(index: int) -> None:
        if index in (5, 10):
            hooks.pop().remove()
            change = double if index == 10 else lambda module, given, result: result * 0.5
            hooks.append(model[0].register_forward_hook(change))

    return train, {"between": between}


@loop(calls=12, replays=12 - 6 - 3)
def a_layer_that_gets_its_shape_late(device: str, train: Any) -> Any:
    """After six calls, which run as they are: one of its parameters has no shape until then."""
    late, settings = nn.LazyLinear(2).to(device), {"late": False}

    def step(batch: Batch) -> Any:
        loss = train(batch)
        with torch.no_grad():
            return (loss, late(batch["x"])) if settings["late"] else loss

    def between(index: int) -> None:
        if index == 5:
            with torch.no_grad():
                late.initialize_parameters(torch.empty(1, 8, device=device))
                late.weight.fill_(0.5)
                late.bias.fill_(0.25)
            settings["late"] = True

    return step, {"between": between}


@loop(calls=20, replays=2 + 3 + 3 + 3, recordings=4)
def objects_that_move_on(model: Any, train: Any) -> Any:
    """The model changes several times, each time for good: after each the step is observed again, and not refused."""

    # Of four calls after a change one is a capture that is not what was observed, two are observed.
    def between(index: int) -> None:
        if index in (4, 9, 14):
            model.append([nn.ReLU(), nn.LeakyReLU(), nn.Tanh()][index // 5])

    return train, {"between": between}


@program
def parameters_that_share_a_gradient(device: str) -> Program:
    """From the seventh call on what is computed for either is added to the same tensor."""
    one, other = (nn.Parameter(torch.ones(8, device=device)) for _ in range(2))

    def step(batch: Batch) -> torch.Tensor:
        loss = ((one * 2 + other) * batch["x"]).sum()
        loss.backward()
        return loss.detach()

    def between(index: int) -> None:
        if index == 6:
            other.grad = one.grad

    def state() -> list[torch.Tensor]:
        return [gradient for gradient in (one.grad, other.grad) if gradient is not None]

    return Program(step, batches(device, 14), state, between, replays=4 + 5, recordings=2)
