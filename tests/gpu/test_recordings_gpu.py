"""Compiled functions on a GPU: recordings, results of changing sizes, no graphs, bound parameters, streams."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import defaultdict
from typing import Any

import pytest
import torch
from gpu_harness import drawn, replays
from real_programs.record import Setting, programs
from torch import nn

import optimizations
from optimizations.calls.bound import READS_BEFORE
from optimizations.calls.shortcut import Ordered
from tests.optimizations.trees.test_partition_inputs import PROGRAMS as OVER_PARTITIONS
from tests.optimizations.trees.test_partition_inputs import differing_calls

pytestmark = pytest.mark.gpu


WIDTH, LAYERS = 256, 24
SIZES, FIRST_SIZES = 40, 4
"""The first sizes do not count: code is still compiled and tuned for them."""


@pytest.mark.alone
@pytest.mark.parametrize("concurrency", ["off", "auto"])
def test_recording_takes_at_most_a_quarter_longer_than_stocks(concurrency: str) -> None:
    """Each size of a dynamic program is warmed up in its first call, and recorded in its second.

    Its kernels are a chain, so the launches of the first recording alone are noted.
    """
    layers = itertools.chain.from_iterable((nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
    net = nn.Sequential(*layers).cuda()
    ways = {
        "encore": torch.compile(net, dynamic=True, backend="encore", options={"concurrency": concurrency}),
        "stock": torch.compile(net, dynamic=True, mode="reduce-overhead"),
    }
    took = defaultdict(list)
    with torch.no_grad():
        for number in range(SIZES):
            x = torch.randn(64 + 8 * number, WIDTH, device="cuda")
            for name in sorted(ways, reverse=bool(number % 2)):
                for _ in range(2):
                    torch.compiler.cudagraph_mark_step_begin()
                    torch.cuda.synchronize()
                    begun = time.perf_counter()
                    ways[name](x)
                    torch.cuda.synchronize()
                    seconds = time.perf_counter() - begun
                if number >= FIRST_SIZES:
                    took[name].append(seconds)
    assert len(optimizations.recordings()) == SIZES
    encore, stock = (statistics.median(took[name]) for name in ("encore", "stock"))
    print(f"a recording takes {encore * 1e3:.2f} ms, one of stock's {stock * 1e3:.2f} ms")
    assert encore <= 1.25 * stock


ROUNDS = 80
"""Rounds of a program, of which the first half does not count."""


@pytest.mark.alone
@pytest.mark.parametrize("name", ["load_state_dict_assign", "swapped_parameter_data"])
def test_replaced_weights_take_no_longer_than_under_stock(name: str) -> None:
    """The program runs both ways in one process, round by round, so that the host is the same for both."""
    program = programs()[name]
    ways = {mode: program.build(Setting(mode, "cuda", tiny=False)).step for mode in ("encore", "stock")}
    ratios = []
    for number in range(ROUNDS):
        took = {}
        for mode in sorted(ways, reverse=bool(number % 2)):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for call in range(program.calls):
                result = ways[mode](call)
            torch.cuda.synchronize()
            took[mode] = time.perf_counter() - begun
            del result
        ratios.append(took["stock"] / took["encore"])
    speed = statistics.median(ratios[ROUNDS // 2 :])
    print(f"{name}: {speed:.3f} times as fast as under stock")
    assert speed >= 0.95  # the limit of `programs.py`; one process differs from another by up to 0.03


ROWS = (8, 24, 40)


def _boxes(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x * 2 + y).relu(), (x - y).sum(1)


@pytest.mark.parametrize("selection", ["off", "measure"])
def test_changing_sizes_are_correct_and_not_recorded_again(selection: str) -> None:
    call = torch.compile(_boxes, backend="encore", dynamic=True, options={"selection": selection})
    with torch.no_grad():
        for step in range(300):
            x = torch.full((ROWS[step % 3], 16), float(step), device="cuda")
            y = torch.full_like(x, 1.0 - step)
            results = call(x, y)
            for found, expected in zip(results, _boxes(x, y), strict=True):
                assert torch.equal(found, expected), step
            assert all(vars(result) for result in results), "the mark that this is about"
            del results, found
    assert sum(one.steady_replays for one in optimizations.recordings()) > 100


def test_small_function_follows_graphs_over_streams() -> None:
    """It waits for the graph that makes its input, and the next replay, which writes over that, waits for it."""
    weight = torch.randn(2048, 2048, device="cuda", dtype=torch.float64) / 45

    def large(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.tanh(x @ weight)
        return x

    def small(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    graphed = torch.compile(large, backend="encore")
    plain = torch.compile(small, backend="encore", options={"selection": "rule"})
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [torch.randn(2048, 2048, device="cuda", dtype=torch.float64) for _ in range(3)]
    torch.cuda.synchronize()
    with torch.no_grad():
        for step in range(30):
            torch.compiler.cudagraph_mark_step_begin()
            x = inputs[step % 3]
            with torch.cuda.stream(streams[step % 2]):
                made = graphed(x)
            with torch.cuda.stream(streams[1 - step % 2]):
                result = plain(made)
            del made
            torch.compiler.cudagraph_mark_step_begin()
            with torch.cuda.stream(streams[step % 2]):
                graphed(inputs[(step + 1) % 3])
            torch.cuda.synchronize()
            torch.testing.assert_close(result, small(large(x)))
    assert any(one.reason.startswith("selection") for report in optimizations.report() for one in report.uncaptured)


# Bound parameters and shortcuts with CUDA graphs. Needs an NVIDIA GPU.


def close(results: Any, expected: Any) -> None:
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)


class Deep(nn.Module):
    """A model with more parameters than are passed one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(20))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y)) + x
        return y, y.sum(0)


def steady_replays() -> int:
    return sum(one.steady_replays for one in optimizations.recordings())


def slow_calls() -> list[str]:
    return [way.reason for graph in optimizations.report() for way in graph.slow_calls]


def test_bound_arguments_skip_generated_code() -> None:
    model = Deep().eval().cuda().double()
    run = torch.compile(model, backend="encore", fullgraph=True)
    inputs = [torch.randn(4, 8, device="cuda", dtype=torch.double) for _ in range(5)]

    def check() -> None:
        for x in inputs:
            torch.compiler.cudagraph_mark_step_begin()
            close([one.clone() for one in run(x)], list(model(x)))

    with torch.no_grad():
        for _ in range(200):
            check()
            if optimizations.settled():
                break
        orders = [one for one in gc.get_objects() if type(one) is Ordered and one.order is not None and one.ready]
        passed = [len(one.order.arguments) for one in orders if one.order is not None]
        assert 41 in passed, "Inductor's code around the partition was understood"
        before = steady_replays()
        for _ in range(4):
            check()
        assert steady_replays() == before + 20, slow_calls()
        model.load_state_dict({name: value * 0.75 for name, value in model.state_dict().items()}, assign=True)
        for _ in range(READS_BEFORE + 3):
            check()


# A function that writes an argument on a GPU equals the uncaptured program in results and buffers.


def accumulate(x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    memory.mul_(0.75).add_(x.sin())
    return torch.softmax(memory @ x, -1)


def test_replay_on_another_stream_follows_writes_of_the_program() -> None:
    call = torch.compile(accumulate, backend="encore", options={"selection": "off"})
    twin = torch.compile(accumulate)
    mine, its = torch.zeros(64, 64, device="cuda"), torch.zeros(64, 64, device="cuda")
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    with torch.inference_mode():
        for step in range(80):
            stream = streams[step // 8 % 2]
            stream.wait_stream(streams[1 - step // 8 % 2])
            with torch.cuda.stream(stream):
                for one in (mine, its):
                    one.mul_(0.5)
                x = drawn(64, 64, seed=step)
                out, expected = call(x, mine), twin(x, its)
                assert torch.equal(out, expected) and torch.equal(mine, its), step
                del out, expected
    assert replays() > 20


@pytest.mark.parametrize("program", OVER_PARTITIONS)
def test_arguments_over_partitions_equal_eager(program: Any) -> None:
    """Inductor checks alignment and copies inputs in its own code here, which the simulation replaces."""
    assert not differing_calls(program, "cuda")
