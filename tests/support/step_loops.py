"""Training loops of several fields: new optimizers, gradients of samples, norms and averages of weights.

They belong to the programs of `step_programs`.
"""

from __future__ import annotations

from typing import Any

import torch
from step_parts import Program, batches, loss_of, network, program, state_of, training_step
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations


class Orthogonal(torch.optim.Optimizer):
    """Updates that are made orthogonal, as Muon's."""

    def __init__(self, parameters: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"].mul_(group["momentum"]).add_(parameter.grad)
                update = average / (average.norm() + 1e-7)
                for _ in range(3):
                    square = update @ update.T
                    update = 3.4445 * update + (-4.775 * square + 2.0315 * square @ square) @ update
                parameter.add_(update, alpha=-group["lr"])


@program
def matrices_and_vectors_with_optimizers_of_their_own(device: str) -> Program:
    """The momentum changes after the eighth call."""
    model = network(device)
    matrices = Orthogonal([p for p in model.parameters() if p.ndim == 2])
    others = torch.optim.SGD([p for p in model.parameters() if p.ndim < 2], lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        for optimizer in (matrices, others):
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def between(index: int) -> None:
        matrices.param_groups[0]["momentum"] = 0.95 if index < 7 else 0.9

    return Program(step, batches(device, 14), lambda: state_of(model, matrices), between, replays=14 - 5, recordings=2)


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


@program
def gradients_of_each_sample(device: str) -> Program:
    """Clipped one by one, as for privacy, and given to the optimizer as new tensors."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

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

    return Program(step, batches(device), lambda: state_of(model))


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
    """As in cross-validation: the first call of each makes the states of its optimizer."""

    class Trainer:
        def __init__(self) -> None:
            self.begin()

        def begin(self) -> None:
            self.model = network(device)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

        def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, batch)
            loss.backward()
            self.optimizer.step()
            return loss.detach()

    trainer, scores = Trainer(), list[torch.Tensor]()

    def between(index: int) -> None:
        if index % 9 == 8:
            scores.append(loss_of(trainer.model, calls[0][0]).detach())
            trainer.begin()

    calls = batches(device, 4 * 9)
    return Program(trainer.step, calls, lambda: [*scores, *state_of(trainer.model)], between, replays=31, recordings=2)


@program
def gradients_in_one_tensor(device: str) -> Program:
    """Those of all parameters are views of it, as for a collective, and are never set to None."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = torch.zeros(sum(parameter.numel() for parameter in model.parameters()), device=device)
    sizes = [parameter.numel() for parameter in model.parameters()]
    for parameter, part in zip(model.parameters(), whole.split(sizes), strict=True):
        parameter.grad = part.view_as(parameter)

    def step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        whole.zero_()
        loss = loss_of(model, batch)
        loss.backward()
        whole.clamp_(-0.1, 0.1)
        optimizer.step()
        return loss.detach(), whole.norm()

    return Program(step, batches(device), lambda: [*state_of(model), whole])
