"""Hold results without a tensor of the caller's: by capsules, storages, scripts, backwards, errors."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn

from kinds.world import STEPS, World, kind


def _results(world: World) -> Any:
    """Yield results of a compiled module one by one, without a reference of its own."""
    run = world.compile(world.module(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    with torch.no_grad():
        for step in range(2 * STEPS):
            yield run(world.values(step))


@kind()
def results_in_capsules(world: World) -> None:
    capsules = [torch.utils.dlpack.to_dlpack(y) for y in _results(world)]
    world.note([torch.from_dlpack(one) for one in capsules])


@kind()
def results_of_which_only_the_memory_is_referenced(world: World) -> None:
    storages = [y.untyped_storage() for y in _results(world)]
    world.note([torch.empty(0, device=world.device).set_(one, 0, (3, 4), (4, 1)) for one in storages])


@kind()
def results_in_backwards_of_others(world: World) -> None:
    weight = world.values(50, grad=True)
    losses = [(weight * y).sum() for y in _results(world)]
    for loss in losses:
        loss.backward()
        world.note(weight.grad)
        weight.grad = None


@kind()
def results_in_errors_that_are_kept(world: World) -> None:
    def refused(y: torch.Tensor) -> TracebackType | None:
        try:
            raise ValueError("as ever")
        except ValueError as error:
            return error.__traceback__

    traces = [refused(y) for y in _results(world)]
    world.note([trace.tb_frame.f_locals["y"] for trace in traces if trace is not None])


@kind()
def results_that_become_parameters(world: World) -> None:
    """Each is trained, through the function that it came from."""
    run, found = world.compile(world.module(nn.Linear(4, 4))), []
    for step in range(STEPS):
        with torch.no_grad():
            latent = nn.Parameter(run(world.values(step)))
        optimizer = torch.optim.SGD([latent], lr=0.1)
        for _ in range(2):
            run(latent).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(latent)
    world.note(found)
