"""Training loops as users write them, for the tests of whole-step captures on the CPU's graphs and on a GPU.

Each is made for a device and gives its step, the batches of its calls, what happens between calls, and the tensors to
be compared at the end. A program makes everything from its own seed, so that two of a kind do the same.
"""

from __future__ import annotations

import array
import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn

CALLS = 9


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
    extra: dict[str, Any] = field(default_factory=dict)
    around_all: Callable[[], AbstractContextManager[Any]] = nullcontext
    around_each: Callable[[], AbstractContextManager[Any]] = nullcontext


PROGRAMS: dict[str, Callable[[str], Program]] = {}


def program(make: Callable[[str], Program]) -> Callable[[str], Program]:
    PROGRAMS[make.__name__] = make
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


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        for kept in optimizer.state.values():
            tensors += [value for value in kept.values() if isinstance(value, torch.Tensor)]
    return tensors


@program
def sgd(device: str) -> Program:
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return Program(step, batches(device), lambda: state_of(model, optimizer))


@program
def momentum_foreach_zeroed_at_the_end(device: str) -> Program:
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True)

    def step(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach()}

    return Program(step, batches(device), lambda: state_of(model, optimizer))


@program
def gradients_zeroed_in_place(device: str) -> Program:
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return Program(step, batches(device), lambda: [*state_of(model), *(p.grad for p in model.parameters())])


@program
def gradients_zeroed_outside(device: str) -> Program:
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return Program(step, batches(device), lambda: state_of(model), lambda index: optimizer.zero_grad())


@program
def fused_adamw_with_clipping(device: str) -> Program:
    model = network(device, dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, capturable=device != "cpu")

    def step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss, norm

    return Program(step, batches(device), lambda: state_of(model, optimizer))


@program
def micro_batches_in_one_step(device: str) -> Program:
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(*micro_batches: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for batch in micro_batches:
            loss = loss_of(model, batch) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    plain = [batch for (batch,) in batches(device, 3 * CALLS)]
    groups = [tuple(plain[3 * index : 3 * index + 3]) for index in range(CALLS)]
    return Program(step, groups, lambda: state_of(model))


@program
def accumulation_over_calls(device: str) -> Program:
    """Gradients are there in two of three calls: two recordings."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model, batch) / 3
        loss.backward()
        return loss

    def between(index: int) -> None:
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    return Program(step, batches(device, 15), lambda: state_of(model), between, replays=15 - 5, recordings=2)


@program
def scaler_that_overflows(device: str) -> Program:
    model = network(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True, capturable=device != "cpu")
    scaler = torch.amp.GradScaler(device, init_scale=2.0**14, growth_interval=2)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    calls = batches(device, 12)
    calls[5][0]["x"] *= 1e30  # its gradients overflow: the step is skipped and the scale halved
    calls[9][0]["x"] *= 1e30
    return Program(
        step,
        calls,
        lambda: [*state_of(model, optimizer), torch.tensor(scaler.get_scale())],
        replays=9,
        extra={"scaler": scaler},
    )


@program
def moving_average_of_the_weights(device: str) -> Program:
    model = network(device, norm=True)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
        return loss

    return Program(step, batches(device), lambda: [*state_of(model), *average])


@program
def autocast_in_the_step(device: str) -> Program:
    model = network(device, dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = loss_of(model, batch) + loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return Program(step, batches(device), lambda: state_of(model))


@program
def autocast_around_each_call(device: str) -> Program:
    made = fused_adamw_with_clipping(device)
    made.around_each = lambda: torch.autocast(device, dtype=torch.bfloat16)
    return made


@program
def autocast_around_all_calls(device: str) -> Program:
    """Autocast casts the weights in the first call and keeps that, whatever the optimizer writes."""
    made = fused_adamw_with_clipping(device)
    made.around_all = lambda: torch.autocast(device, dtype=torch.bfloat16)
    return made


@program
def autocast_around_several_calls(device: str) -> Program:
    """Seven calls, then two, then four in regions of their own: their kept casts are others. The first call of a
    region makes casts, and the next two are alike."""
    made = fused_adamw_with_clipping(device)
    made.batches = batches(device, 13)
    left = contextlib.ExitStack()

    def enter() -> contextlib.ExitStack:
        left.enter_context(torch.autocast(device, dtype=torch.bfloat16))
        return left

    def between(index: int) -> None:
        if index in (6, 8):
            left.close()
            enter()

    made.around_all, made.between = enter, between
    made.replays, made.recordings = 4 + 0 + 1, 1
    return made


@program
def views_of_one_tensor(device: str) -> Program:
    """As tokens and their targets are; every other call has them apart."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss

    text = torch.randint(16, (CALLS, 4, 9), generator=torch.Generator().manual_seed(2)).to(device)
    calls = [(rows[:, :-1], rows[:, 1:]) for rows in text]
    calls[6] = torch.empty_strided((4, 8), (9, 1), dtype=torch.int64, device=device).copy_(text[6][:, :-1]), calls[6][1]
    return Program(step, calls, lambda: state_of(model))


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
def tensors_made_of_numbers(device: str) -> Program:
    """As masks begin. The factor is Python's, and changes after the sixth call."""
    made = sgd(device)
    train, settings = made.step, {"factor": 0.1}

    def step(batch: dict[str, torch.Tensor]) -> Any:
        low = torch.tensor(torch.finfo(torch.float32).min, dtype=torch.float32, device=device)
        pair = torch.tensor([settings["factor"], 2], device=batch["x"].device)
        x = torch.where(batch["x"] > low, batch["x"] * pair[0], low) + torch.tensor(True, device=device)
        return train({**batch, "x": x}), pair

    def between(index: int) -> None:
        settings["factor"] = 0.1 if index < 5 else 0.3

    made.step, made.between, made.replays, made.recordings = step, between, 3 + 1, 2
    return made


@program
def a_tensor_without_elements(device: str) -> Program:
    """As the caches of Hugging Face's models begin: nothing is copied to make one."""
    made = sgd(device)
    train = made.step

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        kept = torch.tensor([], device=device)
        return train({**batch, "x": torch.cat([kept, batch["x"].flatten()]).view_as(batch["x"])})

    made.step = step
    return made


class Remembering(nn.Module):
    """Keeps its last activations, and its batch, as users do to look at them behind the step."""

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
def checkpointed_activations(device: str) -> Program:
    from torch.utils.checkpoint import checkpoint

    first, second = network(device), nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        hidden = checkpoint(first, batch["x"], use_reentrant=False)
        loss = nn.functional.cross_entropy(second(hidden), batch["y"])
        loss.backward()
        optimizer.step()
        return loss

    return Program(step, batches(device), lambda: [*state_of(first), *state_of(second)])


@program
def two_shapes(device: str) -> Program:
    made = sgd(device)
    small = batches(device, CALLS, rows=3)
    mixed = [batch for pair in zip(batches(device), small, strict=True) for batch in pair]
    return Program(made.step, mixed, made.state, replays=2 * CALLS - 5, recordings=2)


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


@program
def writes_into_its_batch(device: str) -> Program:
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> Any:
        optimizer.zero_grad()
        batch["x"].mul_(2)
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return batch["y"], batch["x"][1:], model[0].weight, loss

    calls = batches(device)
    return Program(step, calls, lambda: [*state_of(model), *(batch["x"] for (batch,) in calls)])


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
def model_and_optimizer_as_arguments(device: str) -> Program:
    made = network(device)
    given = torch.optim.SGD(made.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, batch: Any, factor: float) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch) * factor
        loss.backward()
        optimizer.step()
        return loss

    calls = [(made, given, batch, 0.5) for (batch,) in batches(device)]
    return Program(
        lambda model, optimizer, batch, factor: step(model, optimizer, batch=batch, factor=factor),
        calls,
        lambda: state_of(made),
    )


@program
def two_networks_in_turn(device: str) -> Program:
    """As a generative adversarial network trains: each step uses both, and writes one."""
    first, second = network(device), nn.Linear(4, 8).to(device)
    one = torch.optim.SGD(first.parameters(), lr=0.1)
    other = torch.optim.SGD(second.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        one.zero_grad()
        judged = first(second(first(batch["x"]).detach()).detach()).square().mean()
        judged.backward()
        one.step()
        other.zero_grad()
        made = second(first(batch["x"]).detach())
        fooled = first(made).mean()
        fooled.backward()
        other.step()
        return judged, fooled

    return Program(step, batches(device), lambda: [*state_of(first), *state_of(second)])


@program
def layers_frozen_and_unfrozen(device: str) -> Program:
    """As fine-tuning does, layer by layer. Nothing but `requires_grad` changes, and comes back."""
    model = network(device)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    def between(index: int) -> None:
        model[0].requires_grad_(6 <= index < 13)

    return Program(step, batches(device, 18), lambda: state_of(model), between, replays=4 + 5 + 3, recordings=2)


@program
def gradients_of_layers_that_were_frozen(device: str) -> Program:
    """They stay, and the optimizer goes on using them: nobody sets them to None."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    def between(index: int) -> None:
        if index == 5:
            model[0].requires_grad_(False)
        if index == 10:
            model[0].weight.grad = None

    return Program(step, batches(device, 16), lambda: state_of(model), between, replays=3 + 3 + 3, recordings=3)


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

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    def between(index: int) -> None:
        if index in (4, 9, 14):
            model.append([nn.ReLU(), nn.LeakyReLU(), nn.Tanh()][index // 5])

    # Of four calls after a change one is a capture that is not what was observed, two are observed.
    return Program(step, batches(device, 20), lambda: state_of(model), between, replays=2 + 3 + 3 + 3)


def outcome(made: Program, step: Callable[..., Any]) -> list[torch.Tensor]:
    """Everything a program returned, kept until the end, and its state there."""
    torch.manual_seed(3)
    kept: list[Any] = []
    with made.around_all():
        for index, batch in enumerate(made.batches):
            with made.around_each():
                kept.append(step(*batch))
            made.between(index)
    found: list[torch.Tensor] = []

    def collect(nest: Any) -> None:
        if isinstance(nest, torch.Tensor):
            found.append(nest.detach())
        elif isinstance(nest, dict):
            collect(list(nest.values()))
        elif isinstance(nest, (list, tuple)):
            for member in nest:
                collect(member)

    collect(kept)
    collect(list(made.state()))
    return found
