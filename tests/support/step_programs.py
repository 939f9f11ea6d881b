"""Training loops as users write them, for the tests of whole-step captures on the CPU's graphs and on a GPU.

Each is made for a device and gives its step, the batches of its calls, what happens between calls, and the tensors to
be compared at the end. `PROGRAMS` holds them all, those of `step_changes` included.
"""

from __future__ import annotations

from typing import Any

import step_changes  # noqa: F401 - its programs are among them
import torch
from step_parts import (
    CALLS,
    PROGRAMS,
    Program,
    batches,
    descend,
    loop,
    loss_of,
    network,
    program,
    state_of,
    training_step,
)
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations

__all__ = ["PROGRAMS"]


def with_gradients(model: nn.Module) -> dict[str, Any]:
    """Compare the gradients as well at the end."""
    return {"state": lambda: [*state_of(model), *(p.grad for p in model.parameters())]}


@loop()
def gradients_zeroed_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    step = training_step(model, optimizer, zero=lambda: optimizer.zero_grad(set_to_none=False))
    return step, with_gradients(model)


@loop()
def gradients_zeroed_outside(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return training_step(model, optimizer, zero=lambda: None), {"between": lambda index: optimizer.zero_grad()}


@loop(dropout=0.2, make_optimizer=torch.optim.AdamW, options={"lr": 0.01, "fused": True})
def fused_adamw_with_clipping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss, norm

    return step


@loop()
def numbers_assigned_to_parts_of_tensors(device: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """On a GPU PyTorch takes each that is assigned from a tensor in CPU memory, a new one on every call."""

    def step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, y = batch["x"].clone(), batch["y"].clone()
        x[:, 0] = 1
        x[..., -2:] = -0.5
        x[x > 1.5] = 0.25
        x[:, 4:][:, x[0, 4:] < 0] = True
        x = torch.where(x > 1, 0.5, x).masked_fill(x < -1, -1) * torch.tensor(0.5, device=device)
        y[y == 0] = -100
        return descend(nn.functional.cross_entropy(model(x), y), optimizer).detach(), x, y

    return step


@loop(calls=15, replays=15 - 5, recordings=2)
def accumulation_over_calls(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Gradients are there in two of three calls: two recordings."""

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model, batch) / 3
        loss.backward()
        return loss

    def between(index: int) -> None:
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    return step, {"between": between}


@program
def autocast_around_each_call(device: str) -> Program:
    made = fused_adamw_with_clipping(device)
    made.around_each = lambda: torch.autocast(device, dtype=torch.bfloat16)
    return made


@program
def views_of_one_tensor(device: str) -> Program:
    """Tokens and their targets are views of one tensor, but for one call."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return descend(nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()), optimizer)

    text = torch.randint(16, (CALLS, 4, 9), generator=torch.Generator().manual_seed(2)).to(device)
    calls = [(rows[:, :-1], rows[:, 1:]) for rows in text]
    calls[6] = torch.empty_strided((4, 8), (9, 1), dtype=torch.int64, device=device).copy_(text[6][:, :-1]), calls[6][1]
    return Program(step, calls, lambda: state_of(model))


@loop(replays=2 * CALLS - 5, recordings=2)
def two_shapes(device: str, train: Any) -> Any:
    pairs = zip(batches(device), batches(device, rows=3), strict=True)
    return train, {"batches": [batch for pair in pairs for batch in pair]}


@loop()
def model_and_optimizer_as_arguments(device: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, batch: Any, factor: float) -> torch.Tensor:
        return descend(loss_of(model, batch) * factor, optimizer)

    return (
        lambda model, optimizer, batch, factor: step(model, optimizer, batch=batch, factor=factor),
        {"batches": [(model, optimizer, batch, 0.5) for (batch,) in batches(device)]},
    )


class Accelerator:
    """A library's trainer that counts micro-batches; every second one trains."""

    __module__ = "hypothesis"

    def __init__(self) -> None:
        self.steps, self.trains, self.share = 0, False, 0.5

    def counts(self) -> None:
        self.steps += 1
        self.trains = self.steps % 2 == 0

    def backward(self, loss: torch.Tensor) -> None:
        (loss * self.share).backward()


@loop(calls=3 * CALLS, replays=3 * CALLS - 6, recordings=2)
def library_that_counts_around_the_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    accelerator = Accelerator()

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        if accelerator.trains:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step, {"between": lambda index: accelerator.counts()}


@program
def optimizers_in_hooks_of_the_backward(device: str) -> Program:
    """Each parameter has its own, which runs as soon as its gradient is there."""
    model = network(device)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.dim() > 1:
            parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        return loss.detach()

    return Program(step, batches(device), lambda: state_of(model, *optimizers.values()))


@loop()
def gradients_of_each_sample(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Clipped one by one, as for privacy, and given to the optimizer as new tensors."""

    def loss_of_one(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        found = vmap(grad(loss_of_one), (None, 0, 0))(weights, batch["x"], batch["y"])
        for name, parameter in model.named_parameters():
            norm = found[name].flatten(1).norm(dim=1).clamp(min=1.0)
            parameter.grad = torch.einsum("b...,b->...", found[name], 1 / norm) / len(norm)
        optimizer.step()
        return found["0.weight"].norm()

    return step


@program
def weights_with_norms_of_their_own(device: str) -> Program:
    """Spectral norms iterate in training; two calls are evaluations."""
    torch.manual_seed(7)
    first = parametrizations.spectral_norm(nn.Linear(8, 8))
    model = nn.Sequential(first, nn.ReLU(), parametrizations.weight_norm(nn.Linear(8, 4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def between(index: int) -> None:
        model.train(index not in (6, 7))

    calls = batches(device, 14)
    return Program(training_step(model, optimizer), calls, lambda: state_of(model), between, replays=14 - 3 - 2)


@program
def hyperparameters_that_change_one_by_one(device: str) -> Program:
    model = network(device, dropout=0.2)
    options: Any = {"fused": True, "capturable": device != "cpu"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, **options)

    def between(index: int) -> None:
        group = optimizer.param_groups[0]
        if index == 5:
            group["betas"] = (0.8, 0.99)
        if index == 9:
            group["weight_decay"] = 0.0
        if index == 13:
            model[1].p = 0.5

    step = training_step(model, optimizer)
    return Program(
        step, batches(device, 18), lambda: state_of(model, optimizer), between, replays=3 + 3 * 2 + 0, recordings=4
    )


@program
def folds_with_a_network_and_an_optimizer_each(device: str) -> Program:
    """Cross-validation: the first call of each fold makes the states of its optimizer."""

    class Trainer:
        def __init__(self) -> None:
            self.begin()

        def begin(self) -> None:
            self.model = network(device)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

        def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return descend(loss_of(self.model, batch), self.optimizer).detach()

    trainer, scores = Trainer(), list[torch.Tensor]()

    def between(index: int) -> None:
        if index % 9 == 8:
            scores.append(loss_of(trainer.model, calls[0][0]).detach())
            trainer.begin()

    calls = batches(device, 4 * 9)
    return Program(trainer.step, calls, lambda: [*scores, *state_of(trainer.model)], between, replays=31, recordings=2)
