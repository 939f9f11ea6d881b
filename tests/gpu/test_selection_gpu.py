"""Selection on the calls of real programs: results stay right, and tiny functions get no graph. Needs a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from optimizations.race import CALLS

pytestmark = pytest.mark.gpu

Program = Callable[..., torch.Tensor]


def compiled(program: Any, selection: str) -> Program:
    made: Program = torch.compile(program, backend="encore", options={"selection": selection})
    return made


def run(call: Program, program: Program, calls: int, size: int = 64) -> None:
    """Calls whose inputs move, with results within rounding of eager's."""
    inputs = [torch.randn(size, size, device="cuda") for _ in range(5)]
    expected = [program(x) for x in inputs]
    for step in range(calls):
        torch.compiler.cudagraph_mark_step_begin()
        result = call(inputs[step % 5]).clone()
        torch.testing.assert_close(result, expected[step % 5], rtol=1e-3, atol=1e-3)


def many_kernels(x: torch.Tensor) -> torch.Tensor:
    for _ in range(24):
        x = torch.softmax(x @ x.t() / x.shape[0], 0) @ x
    return x


@torch.no_grad()
def test_race_does_not_disturb_a_capture_in_another_thread() -> None:
    """Querying an event would end a capture in CUDA's global mode."""
    call = compiled(many_kernels, "measure")
    run(call, many_kernels, 3 * (CALLS + 1))  # during the race
    x, failures = torch.ones(64, 64, device="cuda"), list[BaseException]()
    begun, done = threading.Event(), threading.Event()

    def capture() -> None:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                _ = x + 1
                begun.set()
                done.wait(20)
        except BaseException as error:
            failures.append(error)
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(20)
    for _ in range(20):
        torch.compiler.cudagraph_mark_step_begin()
        call(x)
    done.set()
    thread.join()
    assert not failures, failures
