"""Measure what a compiled call costs the CPU: Dynamo alone, and Encore's fast path with the launch left out.

Needs no GPU: graphs are those of the simulated device. Prints one line of microseconds for each number of parameters.

Usage: python tests/support/host_times.py [PARAMETERS ...]    default: 0 144 576
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

SETTLING_CALLS, MOST_SETTLING_CALLS, ROUNDS, CALLS = 40, 400, 9, 100


class Layer(nn.Module):
    """Four parameters."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.register_parameter(name, nn.Parameter(torch.ones(1)))

    def forward(self) -> list[torch.Tensor]:
        return [self.a, self.b, self.c, self.d]


class Deep(nn.Module):
    """One operator that reads all parameters: to compile it takes no longer with more of them."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(parameters // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, *(parameter for layer in self.layers for parameter in layer())])


def microseconds(call: Callable[[], object]) -> float:
    """Return the CPU time of one call: the best of several rounds, since other processes slow some down."""
    for _ in range(SETTLING_CALLS):
        call()
    rounds = []
    for _ in range(ROUNDS):
        start = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        rounds.append((time.thread_time_ns() - start) / CALLS / 1000)
    return min(rounds)


@contextmanager
def simulated_device() -> Iterator[Any]:
    """Compile for the simulated GPU outside of tests."""
    from simulated_gpu.compiler import simulated

    with pytest.MonkeyPatch.context() as monkeypatch:
        world = simulated(monkeypatch)
        yield next(world)
        next(world, None)


def dynamo_alone(model: nn.Module, x: torch.Tensor) -> float:
    result = model(x)
    compiled = torch.compile(model, backend=lambda graph_module, inputs: lambda *arguments: (result,))
    return microseconds(lambda: compiled(x))


def encore(model: nn.Module, x: torch.Tensor) -> float:
    """Return the time of the fast path, and fail if calls took another one."""
    import optimizations
    from optimizations.trees.containers import managers, settled

    with simulated_device() as world:
        compiled = torch.compile(model, backend="encore", options={"selection": "off"})
        compiled(x)
        for _ in range(MOST_SETTLING_CALLS):
            compiled(x)
            if settled():
                break
        nodes = [node for one in managers() for node in one.nodes()]
        for node in nodes:
            node.graph.replay = lambda: None
        before = sum(node.full_replays for node in nodes), world.cuda.replays
        took = microseconds(lambda: compiled(x))
        assert before == (sum(node.full_replays for node in nodes), world.cuda.replays), optimizations.report()
    return took


def main(counts: list[int]) -> None:
    with torch.no_grad():
        for count in counts:
            x = torch.ones(1)
            alone = dynamo_alone(Deep(count), x)
            torch.compiler.reset()
            print(
                f"{count} parameters: Dynamo alone {alone:.1f} us, Encore {encore(Deep(count), x):.1f} us", flush=True
            )


if __name__ == "__main__":
    main([int(one) for one in sys.argv[1:]] or [0, 144, 576])
