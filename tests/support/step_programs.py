"""Training loops as users write them, for the tests of whole-step captures on the CPU's graphs and on a GPU.

Each is made for a device and gives its step, the batches of its calls, what happens between calls, and the tensors to
be compared at the end. `PROGRAMS` holds them all, those of `step_changes` and `step_loops` included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import step_changes  # noqa: F401 - its programs are among them
import step_loops  # noqa: F401 - and these
import torch
from step_parts import (
    CALLS,
    PROGRAMS,
    Program,
    batches,
    loss_of,
    network,
    program,
    sgd,
    state_of,
    training_step,
)
from torch import nn

__all__ = ["PROGRAMS"]


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

    step = training_step(model, optimizer, zero=lambda: optimizer.zero_grad(set_to_none=False))
    return Program(step, batches(device), lambda: [*state_of(model), *(p.grad for p in model.parameters())])


@program
def gradients_zeroed_outside(device: str) -> Program:
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    step = training_step(model, optimizer, zero=lambda: None)
    return Program(step, batches(device), lambda: state_of(model), lambda index: optimizer.zero_grad())


@program
def gradients_from_before_are_read_and_replaced(device: str) -> Program:
    """What the capture left in `.grad` was never computed, and must not get into those from before."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batches(device)[0][0]).backward()

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        old = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        torch._foreach_add_([parameter.grad for parameter in model.parameters()], old, alpha=0.5)
        optimizer.step()
        return loss.detach()

    return Program(step, batches(device), lambda: [*state_of(model), *(p.grad for p in model.parameters())])


@program
def fused_adamw_with_clipping(device: str) -> Program:
    model = network(device, dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss, norm

    return Program(step, batches(device), lambda: state_of(model, optimizer))


@program
def numbers_assigned_to_parts_of_tensors(device: str) -> Program:
    """On a GPU PyTorch takes each that is assigned from a tensor in CPU memory, a new one on every call."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, y = batch["x"].clone(), batch["y"].clone()
        x[:, 0] = 1
        x[..., -2:] = -0.5
        x[x > 1.5] = 0.25
        x[:, 4:][:, x[0, 4:] < 0] = True
        x = torch.where(x > 1, 0.5, x).masked_fill(x < -1, -1) * torch.tensor(0.5, device=device)
        y[y == 0] = -100
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach(), x, y

    return Program(step, batches(device), lambda: state_of(model))


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
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
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


def checkpointing(
    part: Callable[[torch.Tensor], torch.Tensor], rest: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[..., torch.Tensor]:
    """A step of training that computes `part` once more for its backward."""
    from torch.utils.checkpoint import checkpoint

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        hidden = checkpoint(part, batch["x"], use_reentrant=False)
        loss = nn.functional.cross_entropy(rest(hidden), batch["y"])
        loss.backward()
        optimizer.step()
        return loss

    return step


@program
def checkpointed_activations(device: str) -> Program:
    first, second = network(device), nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    step = checkpointing(first, second, optimizer)
    return Program(step, batches(device), lambda: [*state_of(first), *state_of(second)])


@program
def checkpointed_attention(device: str) -> Program:
    """As a transformer's layer without dropout: attention is marked as drawing random numbers all the same."""
    torch.manual_seed(0)
    project, first = nn.Linear(8, 24).to(device), network(device)
    optimizer = torch.optim.SGD([*project.parameters(), *first.parameters()], lr=0.1)

    def attend(x: torch.Tensor) -> torch.Tensor:
        query, key, value = project(x).view(1, 1, -1, 24).split(8, dim=-1)
        return x + nn.functional.scaled_dot_product_attention(query, key, value)[0, 0]

    step = checkpointing(attend, first, optimizer)
    return Program(step, batches(device), lambda: [*state_of(project), *state_of(first)])


@program
def two_shapes(device: str) -> Program:
    made = sgd(device)
    small = batches(device, CALLS, rows=3)
    mixed = [batch for pair in zip(batches(device), small, strict=True) for batch in pair]
    return Program(made.step, mixed, made.state, replays=2 * CALLS - 5, recordings=2)


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


class Accelerator:
    """As a library's: it counts micro-batches, and every second one trains."""

    __module__ = "hypothesis"

    def __init__(self) -> None:
        self.steps, self.trains, self.share = 0, False, 0.5

    def counts(self) -> None:
        self.steps += 1
        self.trains = self.steps % 2 == 0

    def backward(self, loss: torch.Tensor) -> None:
        (loss * self.share).backward()


@program
def library_that_counts_around_the_step(device: str) -> Program:
    model, accelerator = network(device), Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        if accelerator.trains:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Program(
        step,
        batches(device, 3 * CALLS),
        lambda: state_of(model),
        lambda index: accelerator.counts(),
        replays=3 * CALLS - 6,
        recordings=2,
    )
