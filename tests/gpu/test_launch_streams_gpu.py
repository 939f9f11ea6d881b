"""Graphs of steps and callables that are launched on several streams, from several threads, and inside of captures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_parts import unaudited
from torch import nn

import optimizations

pytestmark = pytest.mark.gpu

WAIT_CYCLES = 20_000_000
"""Some 10 ms in the middle of the graph, in which a launch that does not wait would write to its input."""
SIZE = 128


class Slow(nn.Module):
    """Reads its input at its beginning and at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.inner(x)
        torch.cuda._sleep(WAIT_CYCLES)
        return torch.relu(made) + x


def model() -> Slow:
    torch.manual_seed(7)
    return Slow().cuda()


def inputs(count: int, *, requires_grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(32, SIZE, generator=generator).cuda().requires_grad_(requires_grad) for _ in range(count)]


def recorded(module: nn.Module) -> Any:
    """A step of inference that is replayed."""

    def infer(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return module(x)

    step = unaudited(infer)
    for x in inputs(20):
        step(x)
        if step.report().replays:
            break
    assert step.report().replays, step.report().refusals
    return step


def on(stream: torch.cuda.Stream, call: Callable[[], Any]) -> Any:
    with torch.cuda.stream(stream):
        return call()


def test_step_calls_on_unsynchronized_streams_are_ordered() -> None:
    module = model()
    step = recorded(module)
    given = inputs(12)
    expected = [(torch.relu(module.inner(x)) + x).detach() for x in given]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    before = step.report().replays
    found = [on(streams[index % 3], lambda x=x: step(x)) for index, x in enumerate(given)]
    torch.cuda.synchronize()
    assert step.report().replays == before + len(given)
    torch.testing.assert_close(found, expected)  # a message names the call by its index
    step.close()


@pytest.mark.filterwarnings("ignore:callable 1 runs without its graphs")
def test_callables_on_a_second_stream_run_uncaptured() -> None:
    module = model().requires_grad_(False)
    given = inputs(6, requires_grad=True)
    expected = []
    for x in given:
        result = torch.relu(module.inner(x)) + x
        expected.append((result.detach().clone(), *torch.autograd.grad(result.square().sum(), [x])))
    sample = torch.randn(32, SIZE, device="cuda", requires_grad=True)
    (call,) = graphed = optimizations.graph_callables([module], [(sample,)], outputs="copied")
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()

    def forward_and_backward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = call(x)
        result.square().sum().backward()
        assert x.grad is not None
        return result.detach(), x.grad

    found = [on(streams[index % 2], lambda x=x: forward_and_backward(x)) for index, x in enumerate(given)]
    torch.cuda.synchronize()
    torch.testing.assert_close(found, expected)
    assert graphed.calls_without_graph == len(given) // 2
    graphed.close()


def test_step_called_from_new_threads_is_correct() -> None:
    """A thread that has used no GPU yet has no context, and the graph's nodes are set by calls that need one."""
    module = model()
    step = recorded(module)
    given = inputs(8)
    found: list[torch.Tensor | BaseException] = []

    def call(x: torch.Tensor) -> None:
        try:
            found.append(step(x))
        except BaseException as error:
            found.append(error)

    torch.cuda.synchronize()
    before = step.report().replays
    for x in given:
        thread = threading.Thread(target=call, args=(x,))
        thread.start()
        thread.join()
    torch.cuda.synchronize()
    assert step.report().replays == before + len(given)
    for x, mine in zip(given, found, strict=True):
        assert isinstance(mine, torch.Tensor), mine
        torch.testing.assert_close(mine, (torch.relu(module.inner(x)) + x).detach())
    step.close()


@pytest.mark.parametrize("same", [False, True], ids=["another stream", "the stream of the calls"])
def test_programs_capture_contains_the_work_of_the_step(same: bool) -> None:
    module = model()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    step = on(stream, lambda: recorded(module))
    first, second = inputs(2)
    x = first.clone()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream if same else torch.cuda.Stream()):
        result = step(x)
    for value in (first, second):
        x.copy_(value)
        graph.replay()
        torch.testing.assert_close(result, (torch.relu(module.inner(value)) + value).detach())
    before = step.report().replays
    torch.testing.assert_close(step(second), (torch.relu(module.inner(second)) + second).detach())
    assert step.report().replays == before + 1
    step.close()
