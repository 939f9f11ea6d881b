"""Programs whose CPU values depend on more than their operands: surrounding memory, statistics, threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simulated_gpu.placement import bits, fake_cuda, feeds_on_cpu, graphs_of, placed_runner, runner
from torch import nn

from optimizations import torch_internals
from optimizations.placement import Feeds, Placement, place

CALLS = 4


class Program(nn.Module):
    """`forward` takes `x` on the GPU and `given` on the CPU; `change` writes memory from outside between calls."""

    def given(self, call: int) -> tuple[torch.Tensor, ...]:
        return ()

    def change(self, call: int) -> None:
        pass


class Window(Program):
    """A window of a longer tensor, read around the window; outside of it there are other values in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = torch.arange(40.0)
        self.window = self.whole[5:17].view(4, 3)

    def change(self, call: int) -> None:
        self.whole.numpy()[[1, 4, 20, 25]] += call


class Around(Window):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.window.as_strided((4, 3), (3, 1), 20).to(x.device) + self.window.to(x.device)


class Statistics(Program):
    """Batch norm on the CPU writes its running mean, which the program sent before and sends again after."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.variance = torch.zeros(3), torch.ones(3)

    def given(self, call: int) -> tuple[torch.Tensor, ...]:
        return (torch.arange(12.0).view(4, 3) * (call + 1),)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = x + self.mean.to(x.device)
        normalized = F.batch_norm(t, self.mean, self.variance, training=True)
        return before, x + normalized.to(x.device), x + self.mean.to(x.device)


class FixedStatistics(Statistics):
    def forward(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normalized = F.batch_norm(t, self.mean, self.variance, training=False)
        return (x + normalized.to(x.device),)


def traced(program: Program) -> tuple[torch.fx.GraphModule, list[Any], Placement]:
    mode = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad():
        ((graph_module, inputs),) = graphs_of(program, fake_cuda(torch.ones(4, 3), mode), *program.given(0), mode=mode)
        return graph_module, inputs, place(graph_module, inputs)


def results(kind: Callable[[], Program], run: Callable[..., Any]) -> list[Any]:
    """Return the results of each call by `run`, with the attributes afterwards."""
    program = kind()
    found = []
    for call in range(CALLS):
        if call:
            program.change(call)
        with torch.no_grad():
            ((_, arguments),) = graphs_of(program, torch.full((4, 3), call + 1.0), *program.given(call))
            found.append(bits([*run(*arguments), *(v for v in vars(program).values() if torch.is_tensor(v))]))
    return found


@pytest.mark.parametrize(
    ("kind", "hoisted"),
    [(Around, 1), (Statistics, 0), (FixedStatistics, 0)],
)
def test_undeclared_reads_and_writes_are_found(kind: Callable[[], Program], hoisted: int) -> None:
    graph_module, inputs, placement = traced(kind())
    assert len(placement.report.hoisted) == hoisted
    placed = results(kind, placed_runner(graph_module, placement, inputs))
    assert placed == results(kind, runner(graph_module, inputs))


def test_as_strided_stays_in_the_graph_with_a_reason() -> None:
    assert any("counts places in memory" in left.reason for left in traced(Around())[2].report.left)


def test_batch_norm_with_fixed_statistics_runs_before_the_graph() -> None:
    assert "normalized" in traced(FixedStatistics())[2].report.before


class Padded(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frame = F.pad(torch.ones(2, 1, dtype=torch.bfloat16), (1, 1, 1, 1), value=0.1)
        return x * frame.to(x.device)


class Negative(Program):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.copysign(x, torch.tensor(float("nan")).neg())


@pytest.mark.parametrize("kind", [Padded, Negative])
def test_numbers_that_generated_code_would_change_are_kept(kind: Callable[[], Program]) -> None:
    assert [value.form for value in traced(kind())[2].report.hoisted] == ["kept"]


class Scaled(Program):
    def given(self, call: int) -> tuple[torch.Tensor, ...]:
        return (torch.full((4, 3), float(call)),)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x * t.to(x.device)


def test_threads_do_not_overwrite_what_another_graph_reads() -> None:
    program = Scaled()
    graph_module, inputs, placement = traced(program)
    assert placement.feeds is not None
    assert placement.report.staged
    run = runner(placement.graph_module, placement.example_inputs(inputs))
    feeds = Feeds(feeds_on_cpu(graph_module, placement.feeds, inputs))
    wrong: list[float] = []

    def launched_late(*arguments: Any) -> tuple[Any, ...]:
        time.sleep(0.001)
        return run(*arguments)

    def work(number: int) -> None:
        given = {"x": torch.ones(4, 3), "t": program.given(number)[0]}
        arguments = tuple(
            given[node.name.strip("lL_")] for node in graph_module.graph.nodes if node.op == "placeholder"
        )
        for _ in range(10):
            (result,) = feeds.call(launched_late, arguments)
            wrong.extend({float(value) for value in result.unique()} - {float(number)})

    threads = [threading.Thread(target=work, args=(number,)) for number in (2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
