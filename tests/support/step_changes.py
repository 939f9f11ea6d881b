"""Training loops in which something of Python's changes between calls: numbers, modes, hooks, objects, shapes.

They belong to the programs of `step_programs`.
"""

from __future__ import annotations

import array
from typing import Any

import numpy
import torch
from step_parts import CALLS, Program, batches, loss_of, network, program, sgd, state_of, training_step
from torch import nn


@program
def evaluation_in_between(device: str) -> Program:
    """The mode of the model is Python's: a recording for each."""
    model = network(device, dropout=0.3, norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if model.training:
            optimizer.step()
        return loss

    def between(index: int) -> None:
        model.train(index < 5 or index >= 10)

    return Program(step, batches(device, 14), lambda: state_of(model), between, replays=14 - 3 - 2, recordings=2)


class Trainer:
    """A training loop's own object: what it keeps next to the step may change, what the step uses is watched."""

    def __init__(self, device: str) -> None:
        self.model = network(device, dropout=0.1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.weight = 1.0
        self.count = 0
        self.last: Any = None
        self.source = iter(range(3))
        self.noise = torch.Generator(device=device).manual_seed(5)

    @property
    def scale(self) -> float:
        return 2 * self.weight

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.scale * self.loss(batch)
        loss.backward()
        self.optimizer.step()
        return loss

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        noise = torch.randn(batch["x"].shape, generator=self.noise, device=batch["x"].device)
        return loss_of(self.model, {**batch, "x": batch["x"] + 0.1 * noise})

    def after(self, index: int) -> None:
        self.count += 1
        self.last = torch.zeros(3) + index
        self.history = [self.last]
        if index == 6:
            self.weight = 0.5


@program
def method_of_a_trainer(device: str) -> Program:
    """The weight changes in the seventh call: observed twice again, and recorded."""
    trainer = Trainer(device)
    return Program(
        trainer.step, batches(device, 14), lambda: state_of(trainer.model), trainer.after, replays=14 - 5, recordings=2
    )


@program
def layers_frozen_and_unfrozen(device: str) -> Program:
    """As fine-tuning does, layer by layer. Nothing but `requires_grad` changes, and comes back.

    The first call after it finds gradients where the recording found none, and is observed: it might leave them.
    """
    model = network(device)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def between(index: int) -> None:
        model[0].requires_grad_(6 <= index < 13)

    step, replays = training_step(model, optimizer), 4 + 5 + 2
    return Program(step, batches(device, 18), lambda: state_of(model), between, replays, recordings=2)


@program
def a_layer_frozen_in_every_third_call(device: str) -> Program:
    """From the first call on: calls that find the same gradients differ by what is frozen."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def between(index: int) -> None:
        model[0].requires_grad_(index % 3 != 0)

    step = training_step(model, optimizer)
    return Program(step, batches(device, 18), lambda: state_of(model), between, replays=18 - 7, recordings=3)


@program
def gradients_of_layers_that_were_frozen(device: str) -> Program:
    """They stay, and the optimizer goes on using them: nobody sets them to None."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    step = training_step(model, optimizer, zero=lambda: None)

    def between(index: int) -> None:
        if index == 5:
            model[0].requires_grad_(False)
        if index == 10:
            model[0].weight.grad = None

    return Program(step, batches(device, 16), lambda: state_of(model), between, replays=3 + 3 + 3, recordings=3)


@program
def a_call_that_differs_where_it_would_be_recorded(device: str) -> Program:
    """Python decides by what no watch sees, once: the calls behind it are observed and recorded."""
    made = sgd(device)
    train, hidden = made.step, array.array("i", [0])

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        return loss * 2 if hidden[0] else loss

    def between(index: int) -> None:
        hidden[0] = index == 2

    made.step, made.between, made.replays = step, between, CALLS - 6
    return made


@program
def tensors_made_of_numbers(device: str) -> Program:
    """As masks begin. The factor is Python's, and changes after the sixth call."""
    made = sgd(device)
    train, settings = made.step, {"factor": 0.1}

    def step(batch: dict[str, torch.Tensor]) -> Any:
        low = torch.tensor(torch.finfo(torch.float32).min, dtype=torch.float32, device=device)
        factor = torch.tensor(settings["factor"], device=batch["x"].device)
        x = torch.where(batch["x"] > low, batch["x"] * factor, low) + torch.tensor(True, device=device)
        return train({**batch, "x": x}), factor

    def between(index: int) -> None:
        settings["factor"] = 0.1 if index < 5 else 0.3

    made.step, made.between, made.replays, made.recordings = step, between, 3 + 1, 2
    return made


class Remembering(nn.Module):
    """Keeps its last activations, and its batch, as users do to look at them after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.hidden: torch.Tensor | None = None
        self.seen: dict[str, torch.Tensor | None] = {"x": None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["x"] = x
        self.hidden = self.first(x).relu()
        return self.second(self.hidden)


@program
def activations_kept_in_attributes(device: str) -> Program:
    torch.manual_seed(7)
    model = Remembering().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    last: torch.Tensor | None = None
    looked_at: list[torch.Tensor] = []

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal last
        optimizer.zero_grad()
        last = loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    def between(index: int) -> None:
        assert last is not None and model.hidden is not None
        looked_at.extend([last.detach(), model.hidden.detach(), model.seen["x"]])

    return Program(step, batches(device), lambda: [*state_of(model), *looked_at], between)


@program
def a_shape_that_changes_at_the_same_address(device: str) -> Program:
    made = sgd(device)
    train, table = made.step, torch.arange(12.0, device=device).reshape(3, 4)

    def step(batch: dict[str, torch.Tensor]) -> Any:
        return train(batch), table.sum(0), table * 2

    def between(index: int) -> None:
        if index == 5:
            table.t_()

    made.step, made.between, made.replays, made.recordings = step, between, 3 + 1, 2
    return made


@program
def numbers_of_numpy(device: str) -> Program:
    """An argument and a learning rate, new objects in each call. At the end the argument is 0.0, then -0.0."""
    model = network(device)
    options: Any = {"fused": True, "capturable": device != "cpu"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, **options)
    train = training_step(model, optimizer)

    def step(batch: dict[str, torch.Tensor], factor: Any) -> torch.Tensor:
        return train(batch).detach() * float(factor)

    def between(index: int) -> None:
        optimizer.param_groups[0]["lr"] = numpy.float32(0.5 ** (index + 1))

    factors = [2.0] * 8 + [0.0] * 5 + [-0.0] * 5
    calls = [(batch, numpy.float32(factor)) for (batch,), factor in zip(batches(device, 18), factors, strict=True)]
    return Program(step, calls, lambda: state_of(model, optimizer), between, replays=8 - 4 + 3 + 3, recordings=3)


@program
def a_hook_of_a_module_is_exchanged(device: str) -> Program:
    """The number of hooks stays the same. Later the first hook is registered again."""
    model = network(device)
    step = training_step(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def double(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
        return result * 2

    hooks = [model[0].register_forward_hook(double)]

    def between(index: int) -> None:
        if index in (5, 10):
            hooks.pop().remove()
            change = double if index == 10 else lambda module, given, result: result * 0.5
            hooks.append(model[0].register_forward_hook(change))

    return Program(step, batches(device, 14), lambda: state_of(model), between, replays=3 + 3 + 3, recordings=2)


@program
def hooks_that_come_and_go(device: str) -> Program:
    """Of a parameter, and of all modules: nothing in the step or its model changes."""
    made = sgd(device)
    weight = next(iter(made.state()))
    hooks: list[Any] = []

    def halve(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5

    def between(index: int) -> None:
        if index == 5:
            hooks.append(weight.register_hook(halve))
        if index == 9:
            hooks.append(nn.modules.module.register_module_forward_hook(lambda module, given, result: result * 0.9))
        if index in (7, 12):
            hooks.pop().remove()

    made.batches, made.between = batches(device, 16), between
    made.replays, made.recordings = 3 + 0 + 2 + 1 + 3, 2
    return made


@program
def a_layer_that_gets_its_shape_late(device: str) -> Program:
    """After six calls, which run as they are: one of its parameters has no shape until then."""
    made = sgd(device)
    train, late = made.step, nn.LazyLinear(2).to(device)
    settings = {"late": False}

    def step(batch: dict[str, torch.Tensor]) -> Any:
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

    made.batches = batches(device, 12)
    made.step, made.between, made.replays = step, between, 12 - 6 - 3
    return made


@program
def an_array_of_numpy_that_changes(device: str) -> Program:
    made = sgd(device)
    train, factor = made.step, numpy.array([1.0, 2.0])

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return train(batch) * float(factor[1])

    def between(index: int) -> None:
        factor[1] = 2.0 if index < 5 else 3.0

    made.step, made.between, made.replays, made.recordings = step, between, 3 + 1, 2
    return made


@program
def inputs_that_are_the_same_tensors(device: str) -> Program:
    """Weights of the classes, written in place, and a factor that is another tensor from the eighth call on."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor], weights: torch.Tensor, factor: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"], weight=weights) * factor
        loss.backward()
        optimizer.step()
        weights.mul_(0.9)
        return loss, weights

    weights, factor = torch.ones(4, device=device), torch.full((), 2.0, device=device)
    calls = [
        (*batch, weights, factor if index < 7 else torch.full((), float(index), device=device))
        for index, batch in enumerate(batches(device, 12))
    ]

    def between(index: int) -> None:
        factor.fill_(index)

    return Program(step, calls, lambda: [*state_of(model), weights], between, replays=12 - 3)


@program
def an_argument_that_is_a_weight(device: str) -> Program:
    """In two calls: what the step has written by the time it reads it is not what a copy made before holds."""
    made = sgd(device)
    train, weight = made.step, next(iter(made.state()))

    def step(batch: dict[str, torch.Tensor], other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return train(batch), other.sum()

    made.batches = [
        (*batch, weight.detach()[3:5] if index in (5, 7) else torch.full((2, 8), float(index), device=device))
        for index, batch in enumerate(batches(device))
    ]
    made.step, made.replays = step, CALLS - 3 - 2
    return made


@program
def objects_that_move_on(device: str) -> Program:
    """The model changes several times, each time for good: each is a reason to look again, and not to give up."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def between(index: int) -> None:
        if index in (4, 9, 14):
            model.append([nn.ReLU(), nn.LeakyReLU(), nn.Tanh()][index // 5])

    # Of four calls after a change one is a capture that is not what was observed, two are observed.
    step, replays = training_step(model, optimizer), 2 + 3 + 3 + 3
    return Program(step, batches(device, 20), lambda: state_of(model), between, replays, recordings=4)


@program
def parameters_that_share_a_gradient(device: str) -> Program:
    """From the seventh call on what is computed for either is added to the same tensor."""
    one, other = (nn.Parameter(torch.ones(8, device=device)) for _ in range(2))

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = ((one * 2 + other) * batch["x"]).sum()
        loss.backward()
        return loss.detach()

    def between(index: int) -> None:
        if index == 6:
            other.grad = one.grad

    def state() -> list[torch.Tensor]:
        return [gradient for gradient in (one.grad, other.grad) if gradient is not None]

    return Program(step, batches(device, 14), state, between, replays=4 + 5, recordings=2)
