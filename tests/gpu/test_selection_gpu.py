"""Selection on the calls of real programs: they see nothing of it, and what is kept is not slower. Needs a GPU."""

from __future__ import annotations

import copy
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optimizations
from optimizations import torch_internals
from optimizations.report.selection import SelectionReport
from optimizations.selection import budget, selector, timing
from optimizations.selection.decide import Decision, Judged

pytestmark = pytest.mark.gpu

MOST_CALLS = 6000
"""More than any verdict takes."""


@pytest.fixture(autouse=True)
def own_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(tmp_path))
    optimizations.reset()
    yield
    optimizations.reset()


def chosen(program: Any, **options: Any) -> Callable[..., Any]:
    return torch.compile(program, backend="encore", options={"selection": "measure", **options})


def settle(call: Callable[[int], None]) -> int:
    """Call until nothing is pending; how many calls that took."""
    for step in range(MOST_CALLS):
        call(step)
        if step > 8 and optimizations.settled():
            return step
    raise AssertionError(f"not settled after {MOST_CALLS} calls: {selections()}")


def selections() -> list[SelectionReport]:
    return [one for graph in optimizations.report() for one in graph.selection]


def single_kernel(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2 + 1


def many_kernels(x: torch.Tensor) -> torch.Tensor:
    for _ in range(24):
        x = torch.softmax(x @ x.t() / x.shape[0], 0) @ x
    return x


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("program", [single_kernel, many_kernels])
def test_each_call_has_its_own_result_until_there_is_a_verdict_and_after_it(program: Any, objective: str) -> None:
    compiled = chosen(program, objective=objective)
    inputs = [torch.randn(64, 64, device="cuda") for _ in range(5)]
    expected = [program(x) for x in inputs]

    def call(step: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        # Generated kernels round otherwise than eager; a wrong input would be off by far more.
        torch.testing.assert_close(compiled(inputs[step % 5]).clone(), expected[step % 5], rtol=1e-3, atol=1e-3)

    calls = settle(call)
    (found,) = selections()
    print(f"{program.__name__}, {objective}: {calls} calls, {found}")
    assert found.state == "decided"
    assert found.objective == objective
    assert found.kept in ("none", "copy", "indirection")
    for step in range(50):
        call(step)
    assert selections()[0].calls == found.calls, "nothing is measured any more"


@pytest.mark.alone
def test_a_program_of_many_small_kernels_keeps_its_graph() -> None:
    """Dozens of launches of a few microseconds each: a graph is several times faster on any GPU."""
    compiled = chosen(many_kernels)
    x = torch.randn(64, 64, device="cuda")
    settle(lambda step: compiled(x).sum() and None)
    (found,) = selections()
    assert found.kept in ("copy", "indirection"), found
    (none,) = [one for one in found.candidates if one.candidate == "none"]
    assert none.ratio is not None  # without an interval where it was left early, as hopeless
    assert none.ratio > 1, found


@pytest.mark.alone
@pytest.mark.parametrize("program", [single_kernel, many_kernels])
def test_what_is_kept_is_not_slower_than_the_best_of_all_ways(program: Any) -> None:
    """By times taken afterwards, of programs that know nothing of selection."""
    x = torch.randn(64, 64, device="cuda")
    ways = {
        "compile": torch.compile(program),
        "lean": torch.compile(program, backend="encore"),
        "encore": chosen(program),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for compiled in ways.values():
        settle(lambda step, compiled=compiled: compiled(x) is None and None)  # type: ignore[misc]
    for _ in range(40):
        for name, compiled in ways.items():
            block = []
            for _ in range(6):
                torch.cuda.synchronize()
                started = time.perf_counter()
                compiled(x)
                torch.cuda.synchronize()
                block.append(time.perf_counter() - started)
            times[name].append(statistics.median(block[1:]))
    medians = {name: statistics.median(own) * 1e6 for name, own in times.items()}
    print(program.__name__, medians, selections()[-1])
    best = min(medians["compile"], medians["lean"])
    # What Encore adds around a function that runs without a graph is a few microseconds of Python.
    assert medians["encore"] <= 1.05 * best + 10, medians


class Trained(nn.Module):
    """With state that counts calls, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_statistics_gradients_and_random_numbers_are_those_of_a_program_without_selection() -> None:
    """The same seeds, calls and steps, with selection and without: the same losses, weights and counts."""
    calls = 4000
    histories = []
    for options in ({}, {"selection": "measure"}):
        torch_internals.reset_dynamo()
        optimizations.reset()
        torch.manual_seed(5)
        model = Trained().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        compiled = torch.compile(model, backend="encore", options=options)
        generator = torch.Generator("cuda").manual_seed(9)
        losses = []
        for _ in range(calls):
            x = torch.randn(48, 32, device="cuda", generator=generator)
            loss = compiled(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach().clone())
        norm = model.layers[1]
        assert norm.num_batches_tracked.item() == calls
        weights = [one.detach().clone() for one in model.parameters()]
        histories.append((torch.stack(losses), norm.running_mean.clone(), weights))
    (found, *_) = selections()
    print(selections())
    assert found.functions == 2, "a forward and its backward"
    assert {one.kept for one in selections()} != {None}
    for one, other in zip(*histories, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_stored_verdict_is_used_by_what_is_compiled_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    # Next to other processes calls take so long that a few rounds use the budget up, and a hasty verdict is not stored.
    monkeypatch.setattr(budget, "SHARE", 1e3)
    x = torch.randn(64, 64, device="cuda")
    compiled = chosen(many_kernels)
    settle(lambda step: compiled(x) is None and None)
    kept = selections()[0].kept
    torch.compiler.reset()
    optimizations.reset()
    again = chosen(many_kernels)
    for _ in range(20):
        torch.testing.assert_close(again(x), many_kernels(x), rtol=1e-3, atol=1e-3)
    (found,) = selections()
    assert (found.kept, found.source, found.calls) == (kept, "stored", 0)


def test_nobody_waits_where_synchronisation_is_an_error() -> None:
    """PyTorch's debug mode raises at operators that synchronise; waiting for an event is none."""
    x = torch.randn(64, 64, device="cuda")
    compiled = chosen(many_kernels)
    for _ in range(4):
        compiled(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        settle(lambda step: compiled(x) is None and None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert selections()[0].state == "decided"


@pytest.mark.alone
def test_memory_is_what_a_program_without_graphs_has_once_none_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input is 64 MiB, which a graph has a placeholder for, and its result lies in a pool."""
    nothing_pays = Judged(("none",), Decision("none", "same", (), frozenset()))
    monkeypatch.setattr(selector, "judge", lambda *arguments, **keywords: nothing_pays)
    x = torch.randn(4096, 4096, device="cuda")

    def reserved() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    plain = torch.compile(single_kernel)
    for _ in range(5):
        plain(x)
    without = reserved()
    compiled = chosen(single_kernel)
    for _ in range(4):
        compiled(x)
    with_graphs = reserved()
    settle(lambda step: compiled(x) is None and None)
    (found,) = selections()
    assert found.kept == "none", found
    compiled(x)
    after = reserved()
    print(f"reserved: {without >> 20} MiB without graphs, {with_graphs >> 20} with, {after >> 20} once none is needed")
    assert with_graphs >= without + x.nbytes, "placeholder and result"
    assert after <= without + 4 * 2**20


def test_measured_calls_leave_no_memory_behind_where_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither intermediate results nor workspaces of matrix products, of which forward and backward have one each."""
    graphs_pay = Judged(("copy",), Decision("copy", "same", (), frozenset()))
    monkeypatch.setattr(selector, "judge", lambda *arguments, **keywords: graphs_pay)

    def reserved_after(compiled: Any) -> int:
        x = torch.randn(256, 256, device="cuda", requires_grad=True)

        def call(step: int) -> None:
            compiled(x).sum().backward()
            x.grad = None

        settle(call)
        for step in range(3):
            call(step)
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved()

    without = reserved_after(torch.compile(many_kernels, backend="encore", options={"selection": "off"}))
    torch.compiler.reset()
    optimizations.reset()
    torch.cuda.empty_cache()
    measured = reserved_after(chosen(many_kernels))
    assert {one.kept for one in selections()} == {"copy"}
    assert measured <= without + 4 * 2**20, f"{measured >> 20} MiB, not {without >> 20}"


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_a_program_that_never_waits_for_its_device_settles(objective: str) -> None:
    """It is as far ahead as the driver lets it; inputs that stay the same take the longest of all proofs."""
    x = torch.randn(64, 64, device="cuda")
    compiled = chosen(many_kernels, objective=objective)
    calls = settle(lambda step: compiled(x) is None and None)
    print(f"{objective}: settled after {calls} calls, {selections()}")
    assert selections()[0].state == "decided"


def test_interrupts_while_it_is_measured_leave_results_right() -> None:
    """As in a notebook whose cells are interrupted and run again, at any moment of a call."""
    compiled = chosen(many_kernels)
    inputs = [torch.randn(64, 64, device="cuda") for _ in range(5)]
    expected = [many_kernels(x) for x in inputs]
    for _ in range(12):  # a compilation that is interrupted is another matter
        compiled(inputs[0])
    draw = random.Random(3)
    interrupted = calls = 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(400):
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 4e-3))
                    for _ in range(3):
                        compiled(inputs[draw.randrange(5)])
                finally:  # inside, because the interrupt may still come here
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            chosen_input = draw.randrange(5)
            result = compiled(inputs[chosen_input]).clone()
            torch.testing.assert_close(result, expected[chosen_input], rtol=1e-3, atol=1e-3)
            calls += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    print(f"{interrupted} interrupts in {calls} rounds, {selections()}")
    assert interrupted > 20
    assert not [one.reason for one in selections() if "failed" in (one.reason or "")]
    # An interrupt in Dynamo's own frames may have it compile the program again, or not at all any more.
    torch.compiler.reset()
    optimizations.reset()
    again = chosen(many_kernels)
    settle(lambda step: again(inputs[step % 5]) is None and None)
    assert "decided" in {one.state for one in selections()}, "what was interrupted stands in nobody's way"


def test_streams_that_take_turns_settle_once() -> None:
    compiled = chosen(many_kernels)
    x = torch.randn(64, 64, device="cuda")
    expected = many_kernels(x)
    streams = [torch.cuda.Stream() for _ in range(2)]

    def call(step: int) -> None:
        with torch.cuda.stream(streams[step % 2]):
            streams[step % 2].wait_stream(streams[1 - step % 2])
            torch.testing.assert_close(compiled(x).clone(), expected, rtol=1e-3, atol=1e-3)

    torch.cuda.synchronize()
    settle(call)
    (found,) = selections()
    assert (found.state, found.voided) == ("decided", ()), found


def test_a_step_of_two_forwards_and_one_backward_is_decided() -> None:
    """Two views of a batch through one model."""
    torch.manual_seed(2)
    model = Trained().cuda()
    compiled = chosen(model)
    eager = copy.deepcopy(model)
    # Dropout draws other numbers when it is compiled.
    for one in (model, eager):
        one.layers[3].p = 0.0
    x = torch.randn(48, 32, device="cuda")

    def step(number: int) -> None:
        for one in (model, eager):
            one.zero_grad()
        torch.compiler.cudagraph_mark_step_begin()
        (compiled(x) + compiled(x + 1)).backward()
        (eager(x) + eager(x + 1)).backward()
        if number % 10 == 0:
            for one, other in zip(model.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-3)

    settle(step)
    assert {one.state for one in selections()} == {"decided"}, selections()


def test_nothing_is_timed_inside_a_capture() -> None:
    assert timing.may_time()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert not timing.may_time()


@pytest.mark.alone
def test_timers_measure_what_the_device_does() -> None:
    """Cycles of the device take as long by events as by the host, within what clocks may change."""
    seconds = {}
    torch.cuda._sleep(1000)  # its first call loads the kernel, which the host waits for
    torch.cuda.synchronize()
    for objective in ("latency", "throughput"):
        timer = timing.timer_for(objective, 0)  # type: ignore[arg-type]
        timer.begin()
        torch.cuda._sleep(20_000_000)
        measured = timer.end()
        if objective == "throughput":
            assert measured.seconds() is None, "nobody waited"
        torch.cuda.synchronize()
        seconds[objective] = measured.seconds()
        assert seconds[objective] is not None
    assert 0.002 < seconds["latency"] < 0.2
    assert seconds["throughput"] == pytest.approx(seconds["latency"], rel=0.3)
