"""Functions that write their arguments on a GPU equal the uncaptured program in results and buffers.

Stock leaves them without a graph. Note [Inputs that are written] in `optimizations.trees.graphed_function`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gpu_harness import drawn, replays
from torch import nn

import optimizations
from optimizations.trees.moved_inputs import MOST_RECORDINGS

pytestmark = pytest.mark.gpu

WIDTH, LENGTH, BATCH, LAYERS = 64, 16, 4, 3


class Cached(nn.Module):
    """Layers that each write one row of the cache that they are passed, and read all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(LAYERS))
        self.drop = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor, caches: Sequence[torch.Tensor], place: torch.Tensor) -> torch.Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            query, row = layer(x).chunk(2, dim=-1)
            cache.index_copy_(1, place, row[:, None])
            weights = torch.softmax(torch.einsum("bw,blw->bl", query, cache) / 8, dim=-1)
            x = x + torch.einsum("bl,blw->bw", weights, cache)
        return self.drop(torch.tanh(x))


def caches(count: int = LAYERS, *, of_one: bool = False) -> list[torch.Tensor]:
    """One for each layer; `of_one`: parts of one tensor."""
    if of_one:
        return list(torch.zeros(count, BATCH, LENGTH, WIDTH, device="cuda").unbind(0))
    return [torch.zeros(BATCH, LENGTH, WIDTH, device="cuda") for _ in range(count)]


def decode(
    call: Callable[..., Any], twin: Callable[..., Any], sets: Callable[[int], tuple[Any, Any]], steps: int
) -> None:
    """Steps of both on caches of their own; results and all that was written must be the same bits."""
    places = [torch.tensor([place], device="cuda") for place in range(LENGTH)]
    for step in range(steps):
        mine, its = sets(step)
        x = drawn(BATCH, WIDTH, seed=step)
        place = places[step % LENGTH]
        torch.manual_seed(step)
        out = call(x, mine, place)
        torch.manual_seed(step)
        expected = twin(x.clone(), its, place.clone())
        assert torch.equal(out, expected), step
        assert all(torch.equal(one, other) for one, other in zip(mine, its, strict=True)), step
        del out, expected


def of(name: str) -> Callable[[int], tuple[Any, Any]]:
    """The caches of each step: Encore's, and those of its twin."""
    if name == "one set":
        both = caches(), caches()
        return lambda step: both
    if name == "parts of one tensor":
        parts = caches(of_one=True), caches(of_one=True)
        return lambda step: parts
    if name == "turns":
        several = [(caches(), caches()) for _ in range(5)]
        return lambda step: several[step % 5]
    if name == "new ones":
        kept: list[Any] = []

        def fresh(step: int) -> tuple[Any, Any]:
            if step % 4 == 0:
                kept.append((caches(), caches()))  # all alive: no address comes back
            return kept[-1]

        return fresh
    last: list[Any] = [None]

    def freed(step: int) -> tuple[Any, Any]:
        if step % 4 == 0:
            last[0] = None
            last[0] = caches(), caches()
        return last[0]

    return freed


@pytest.mark.parametrize("selection", ["off", "measure"])
@pytest.mark.parametrize("name", ["one set", "parts of one tensor", "turns", "new ones", "freed ones"])
def test_decoding_writes_the_passed_caches(name: str, selection: str) -> None:
    model = Cached().cuda()
    call = torch.compile(model, backend="encore", options={"selection": selection})
    twin = torch.compile(copy.deepcopy(model))
    with torch.no_grad(), torch._inductor.config.patch(fallback_random=True):
        decode(call, twin, of(name), steps=160)
    if selection == "off":
        assert replays() > 80 or name in ("new ones", "freed ones")
        assert len(optimizations.recordings()) <= MOST_RECORDINGS


def test_replay_on_another_stream_follows_writes_of_the_program() -> None:
    model = Cached().cuda().eval()
    call = torch.compile(model, backend="encore", options={"selection": "off"})
    twin = torch.compile(copy.deepcopy(model))
    mine, its = caches(), caches()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    place = torch.tensor([3], device="cuda")
    with torch.inference_mode():
        for step in range(80):
            stream = streams[step // 8 % 2]
            stream.wait_stream(streams[1 - step // 8 % 2])
            with torch.cuda.stream(stream):
                for one, other in zip(mine, its, strict=True):
                    one.mul_(0.5)
                    other.mul_(0.5)
                x = drawn(BATCH, WIDTH, seed=step)
                out, expected = call(x, mine, place), twin(x, its, place)
                assert torch.equal(out, expected), step
                assert all(torch.equal(one, other) for one, other in zip(mine, its, strict=True)), step
                del out, expected
    assert replays() > 20
