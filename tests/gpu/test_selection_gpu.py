"""Selection on the calls of real programs: results stay right, and tiny functions get no graph. Needs a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import encore
from optimizations.race import CALLS
from optimizations.report.selection import SelectionReport

pytestmark = pytest.mark.gpu

Program = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    encore.reset()
    yield
    encore.reset()


def compiled(program: Any, selection: str) -> Program:
    made: Program = torch.compile(program, backend="encore", options={"selection": selection})
    return made


def decisions() -> list[SelectionReport]:
    return [one for graph in encore.report() for one in graph.selection]


def run(call: Program, program: Program, calls: int, size: int = 64) -> None:
    """Calls whose inputs move, with results within rounding of eager's."""
    inputs = [torch.randn(size, size, device="cuda") for _ in range(5)]
    expected = [program(x) for x in inputs]
    for step in range(calls):
        torch.compiler.cudagraph_mark_step_begin()
        result = call(inputs[step % 5]).clone()
        torch.testing.assert_close(result, expected[step % 5], rtol=1e-3, atol=1e-3)


def one_kernel(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2 + 1


def many_kernels(x: torch.Tensor) -> torch.Tensor:
    for _ in range(24):
        x = torch.softmax(x @ x.t() / x.shape[0], 0) @ x
    return x


def two_partitions(x: torch.Tensor) -> torch.Tensor:
    """A tiny partition before a transfer to the CPU, and a large one after it."""
    first = torch.relu(x) + 1
    return many_kernels(first) + first.sum().cpu().to("cuda")


@torch.no_grad()
def test_tiny_inference_gets_no_graph() -> None:
    run(compiled(one_kernel, "rule"), one_kernel, 12)
    (found,) = decisions()
    assert (found.decision, found.kernels) == ("no graph", 1), found
    assert encore.recordings() == ()
    assert encore.settled()


@torch.no_grad()
def test_large_inference_keeps_its_graph() -> None:
    run(compiled(many_kernels, "rule"), many_kernels, 40)
    (found,) = decisions()
    assert found.decision in ("in place", "copies"), found
    assert len(encore.recordings()) == 1


@torch.no_grad()
@pytest.mark.parametrize("size", [64, 1024])
def test_partitions_have_right_results(size: int) -> None:
    """At 1,024 the first partition returns 4 MiB, which the second one reads."""
    run(compiled(two_partitions, "rule"), two_partitions, 40, size)
    print([(one.decision, one.why) for one in decisions()])


def test_training_step_keeps_its_graphs() -> None:
    model = nn.Linear(8, 8, device="cuda")
    call = compiled(model, "rule")
    for _ in range(20):
        call(torch.randn(8, 8, device="cuda")).sum().backward()
    assert {one.decision for one in decisions()} <= {"in place", "copies"}, decisions()


@torch.no_grad()
@pytest.mark.parametrize("program", [one_kernel, many_kernels])
def test_measured_function_has_right_results(program: Program) -> None:
    call = compiled(program, "measure")
    run(call, program, 3 * (CALLS + 1) + 60)
    torch.cuda.synchronize()
    run(call, program, 2)
    (found,) = decisions()
    print(f"{program.__name__}: {found}")
    assert encore.settled()
    assert found.why.startswith("measured: "), found
    before = found.decision
    run(call, program, 200)
    assert decisions()[0].decision == before


@torch.no_grad()
def test_race_leaves_a_capture_in_another_thread_alone() -> None:
    """Querying an event would end a capture in CUDA's global mode."""
    call = compiled(many_kernels, "measure")
    run(call, many_kernels, 3 * (CALLS + 1))  # in the midst of the race
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
