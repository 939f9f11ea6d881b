"""Second captures and races next to other captures: failed ones, and those of other threads. Needs an NVIDIA GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch
from gpu_harness import call, copy_reasons, encore, recordings

from optimizations.race import CALLS

pytestmark = pytest.mark.gpu


def fails_to_capture() -> None:
    """Fail to capture and continue uncaptured, as a program may."""
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()
    # PyTorch's generator stays in the failed capture until another one succeeds.
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)


def runs_right() -> None:
    """A function of which a second capture is made, with inputs at changing addresses."""
    # No random numbers: while another thread captures, PyTorch's generator gives none.
    weight = torch.linspace(-1, 1, 64 * 64, device="cuda").view(64, 64)
    compiled = encore(lambda x: torch.relu(x @ weight) + x)
    kept = []
    for step in range(40):
        x = torch.linspace(-step, 1, 16 * 64, device="cuda").view(16, 64)
        kept.append(x)
        (result,) = call(compiled, x)
        torch.testing.assert_close(result, torch.relu(x @ weight) + x, rtol=1e-2, atol=1e-1)
    assert any(one.indirect for report in recordings() for one in report.inputs), copy_reasons()


def test_calls_work_after_a_failed_capture_of_the_program() -> None:
    runs_right()
    fails_to_capture()
    runs_right()


@contextlib.contextmanager
def captured_in_another_thread() -> Iterator[None]:
    """In the block, another thread captures a graph, which is right afterwards."""
    begun, done = threading.Event(), threading.Event()
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")

    def capture() -> None:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            out.add_(1)
            begun.set()
            done.wait(120)

    thread = threading.Thread(target=capture)
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        done.set()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert out.tolist() == [1.0] * 4


def test_calls_work_while_another_thread_captures() -> None:
    runs_right()
    with captured_in_another_thread():
        runs_right()


def many_kernels(x: torch.Tensor) -> torch.Tensor:
    for _ in range(24):
        x = torch.softmax(x @ x.t() / x.shape[0], 0) @ x
    return x


@torch.no_grad()
def test_race_does_not_disturb_a_capture_in_another_thread() -> None:
    """Querying an event would end a capture in CUDA's global mode."""
    compiled = torch.compile(many_kernels, backend="encore", options={"selection": "measure"})
    inputs = [torch.randn(64, 64, device="cuda") for _ in range(5)]
    expected = [many_kernels(x) for x in inputs]
    for step in range(3 * (CALLS + 1)):  # until the race
        (result,) = call(compiled, inputs[step % 5])
        torch.testing.assert_close(result, expected[step % 5], rtol=1e-3, atol=1e-3)
    with captured_in_another_thread():
        for _ in range(20):
            call(compiled, inputs[0])


def test_programs_capture_may_contain_compiled_functions() -> None:
    """Forward and backward, which have CUDA graphs of their own outside of it.

    Warmed up on a side stream, as PyTorch asks for: a replayed forward keeps its last result, as stock's does, and with
    it the nodes that add gradients up, which must not belong to the legacy stream.
    """
    net = torch.nn.Linear(16, 16, device="cuda")
    compiled = encore(net)
    x, inside = torch.randn(8, 16, device="cuda"), torch.randn(8, 16, device="cuda")

    def train(given: torch.Tensor, module: torch.nn.Module) -> list[torch.Tensor]:
        return list(torch.autograd.grad(module(given).square().mean(), list(net.parameters())))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(8):
            torch.testing.assert_close(train(x, compiled), train(x, net))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train(inside, compiled)
    for step in range(8):
        torch.testing.assert_close(train(x, compiled), train(x, net))
        inside.copy_(torch.full_like(inside, 0.1 * step))
        graph.replay()
        torch.testing.assert_close(captured, train(inside, net))
