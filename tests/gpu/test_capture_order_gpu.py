"""A program draws the same random numbers with graphs as without, also when the GPU runs late.

PyTorch writes where the random numbers of graphs begin before each capture as well as before each replay, on streams of
their own. See `optimizations.graph.pools`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_harness import assert_same_bits
from step_parts import Program as Loop
from step_parts import batches, network, outcome, state_of, training_step, unaudited

import optimizations
from optimizations import torch_internals

pytestmark = pytest.mark.gpu

LATE_CYCLES = 200_000_000
"""Some 100 ms: longer than the host takes from a capture to the replay."""

CALLS = 60


@pytest.fixture
def late_captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Delays what each capture enqueues, as other work on the GPU may do. Gives a list with an entry per capture."""
    begun: list[int] = []
    begin = torch.cuda.CUDAGraph.capture_begin

    def late(graph: torch.cuda.CUDAGraph, *arguments: Any, **keywords: Any) -> None:
        begun.append(len(begun))
        torch.cuda._sleep(LATE_CYCLES)
        begin(graph, *arguments, **keywords)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
    torch_internals.reset_dynamo()
    optimizations.reset()
    yield begun
    optimizations.reset()


def works_for_long(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Some 10 ms on an H100, in which a capture of the same call may write. Its input is used by a library, too."""
    for _ in range(4):
        x = x @ weight
    # Times 0 would be left out by Inductor, and so would the products.
    return torch.nn.functional.dropout(1e-30 * x.clamp(-1, 1) + 1, 0.5)


def draws_at_once(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x.abs() + 1, 0.5)


@pytest.mark.parametrize("program", [works_for_long, draws_at_once])
@pytest.mark.parametrize("options", [{}, {"selection": "measure"}], ids=["", "selected"])
def test_call_draws_the_random_numbers_of_an_uncaptured_run(
    program: Callable[..., torch.Tensor], options: dict[str, Any], late_captures: list[int]
) -> None:
    weight = torch.eye(4096, device="cuda")
    inputs = [torch.rand(4096, 4096, device="cuda") for _ in range(3)]

    def drawn(compiled: Callable[..., torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(11)
        return torch.stack([compiled(inputs[step % 3], weight)[::512, ::512] == 0 for step in range(CALLS)])

    expected = drawn(torch.compile(program))
    assert not late_captures
    found = drawn(torch.compile(program, backend="encore", options=options))
    wrong = (found != expected).flatten(1).any(1).nonzero().flatten()
    assert not len(wrong), f"calls {wrong.tolist()}"
    # That of a new pool, a recording, and a second capture where the generated code does not name all uses.
    needed = 2 if program is draws_at_once else 3
    assert len(late_captures) >= needed, f"{len(late_captures)} captures; {optimizations.report()}"


def test_step_draws_the_random_numbers_of_an_uncaptured_run(late_captures: list[int]) -> None:
    def made() -> Loop:
        model = network("cuda", dropout=0.3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return Loop(training_step(model, optimizer), batches("cuda"), lambda: state_of(model, optimizer))

    eager, graphed = made(), made()
    expected = outcome(eager, eager.step)
    assert not late_captures
    step = unaudited(graphed.step)
    found = outcome(graphed, step)
    assert late_captures
    assert step.report().replays
    assert_same_bits(found, expected)
    step.close()


def test_callables_draw_the_random_numbers_of_uncaptured_runs(late_captures: list[int]) -> None:
    def results(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(9)
        return [call(torch.ones(64, 64, device="cuda")).clone() for _ in range(5)]

    dropout = torch.nn.Dropout(0.5)
    expected = results(dropout)
    graphed = optimizations.graph_callables(dropout, [torch.ones(64, 64, device="cuda")])
    found = results(graphed[0])
    assert late_captures
    assert sum(one.replays for one in graphed.report()) == len(found)
    assert_same_bits(found, expected)
    graphed.close()
