"""The programs, by name, and what several of them are made of."""

from __future__ import annotations

import importlib
import pkgutil
import zlib
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from step_parts import Program
from torch import nn

from models.nests import map_tensors, tensors_of

CALLS = 14
PROGRAMS: dict[str, Callable[[str], Program]] = {}
"""Makers of programs by name; each takes a device."""
_NO_PROGRAMS = frozenset({"compare", "record"})


def program(make: Callable[[str], Program]) -> Callable[[str], Program]:
    """Register what makes a program. It is made from a seed of its own."""
    variant(make.__name__, make)
    return make


def variant(name: str, make: Callable[..., Program], *arguments: Any, **options: Any) -> None:
    """Register a program that a function of several makes of these arguments, after the device."""

    def seeded(device: str) -> Program:
        torch.manual_seed(zlib.crc32(name.encode()))
        return make(device, *arguments, **options)

    assert name not in PROGRAMS
    PROGRAMS[name] = seeded


def programs() -> dict[str, Callable[[str], Program]]:
    """All programs. Those that need a library import it when they are made."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name not in _NO_PROGRAMS:
            importlib.import_module(f"library_programs.{module.name}")
    return PROGRAMS


def state_of(*holders: Any) -> list[torch.Tensor]:
    """Parameters and buffers of modules, state of optimizers and what wraps them, and tensors in containers."""
    found: list[torch.Tensor] = []
    for holder in holders:
        if isinstance(holder, nn.Module):
            found += [*holder.parameters(), *holder.buffers()]
        elif hasattr(holder, "state"):
            found += tensors_of([dict(kept) for kept in holder.state.values()])
        else:
            found += tensors_of(holder)
    return found


def descend(
    loss: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    clip: float | None = None,
    scaler: Any = None,
    zeroed: str = "first",
) -> torch.Tensor:
    """Update the parameters once: no gradients, backward, norm of gradients at most `clip`, step. Return the loss.

    A `scaler` scales the loss, as with autocast to float16. Gradients are `zeroed` "first" or "last".
    """
    if zeroed == "first":
        optimizer.zero_grad()
    (loss if scaler is None else scaler.scale(loss)).backward()
    if clip is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([one for group in optimizer.param_groups for one in group["params"]], clip)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    if zeroed == "last":
        optimizer.zero_grad()
    return loss


def training(
    loss_of: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Any, ...]],
    *holders: Any,
    scheduler: Any = None,
    every: int = 1,
    between: Callable[[int], Any] | None = None,
    last: Callable[[], Any] | None = None,
    clip: float | None = None,
    cast: torch.dtype | None = None,
    scaler: Any = None,
    zeroed: str = "first",
    detached: bool | None = None,
) -> Program:
    """Return the plainest training, of which `holders` and the optimizer have the state.

    `loss_of` gives the loss of a batch, or a pair of it and what the step returns besides, such as a dict that the loss
    is added to; autocast to `cast` is around it. `last` ends the step, without gradients. After `every` so many calls
    the scheduler makes a step. The loss is returned `detached`, by default if there is more.
    """
    device = optimizer.param_groups[0]["params"][0].device.type

    def step(*batch: Any) -> Any:
        with torch.autocast(device, dtype=cast) if cast else nullcontext():
            found = loss_of(*batch)
        loss, *more = found if isinstance(found, tuple) else (found,)
        descend(loss, optimizer, clip, scaler, zeroed)
        if last is not None:
            with torch.no_grad():
                last()
        given = loss.detach() if (bool(more) if detached is None else detached) else loss
        if more and isinstance(more[0], dict):
            return {"loss": given, **more[0]}
        return (given, *more) if more else given

    def after(index: int) -> None:
        if between is not None:
            between(index)
        elif scheduler is not None and index % every == every - 1:
            scheduler.step()

    return Program(step, batches, lambda: state_of(*holders, optimizer), after)


def on_gpu(device: str) -> bool:
    return device.startswith("cuda")


def many(make: Callable[[torch.Generator], Iterable[Any]], device: str, seed: int = 11) -> list[tuple[Any, ...]]:
    """Arguments of the calls, of what `make` gives."""
    generator = torch.Generator().manual_seed(seed)
    return [map_tensors(tuple(make(generator)), lambda one: one.to(device)) for _ in range(CALLS)]


def images(device: str, rows: int = 4, size: int = 32, classes: int = 5, calls: int = CALLS) -> list[tuple[Any, ...]]:
    """Images of three channels, float32, and their classes."""
    made = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(rows, 3, size, size, generator=made).to(device),
            torch.randint(classes, (rows,), generator=made).to(device),
        )
        for _ in range(calls)
    ]


def drawn(generator: torch.Generator, n: int = 4, c: int = 1, size: int = 16) -> torch.Tensor:
    """Return `n` images of `c` channels with values between -1 and 1."""
    return torch.rand(n, c, size, size, generator=generator) * 2 - 1


def tokens(device: str, rows: int = 3, length: int = 12, vocab: int = 64, pad: int | None = None) -> list[torch.Tensor]:
    """Sequences of int64, each with another length where there is a token to pad them with."""
    made = torch.Generator().manual_seed(6)
    found = []
    for _ in range(CALLS):
        ids = torch.randint(4, vocab, (rows, length), generator=made)
        if pad is not None:
            for row in range(rows):
                ids[row, length - int(torch.randint(0, length // 2, (), generator=made)) :] = pad
        found.append(ids.to(device))
    return found


def capturable(device: str) -> dict[str, Any]:
    return {"capturable": True} if on_gpu(device) else {}


def on_the_device(device: str) -> dict[str, Any]:
    """For Adam and AdamW: capturable on a GPU; fused on a CPU, which has no other way."""
    return {"capturable": True} if on_gpu(device) else {"fused": True}


def backend(device: str) -> str:
    """Inductor takes long to compile for a CPU, and the stand-in for a GPU cannot see what it calls."""
    return "inductor" if on_gpu(device) else "aot_eager"
