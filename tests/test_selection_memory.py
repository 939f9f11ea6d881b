"""A verdict that needs no graph frees the graphs and their pool: memory is what the program has without them."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from selection_on_cpu import RULES, make, pair, run, run_and_hold, run_pair, selection
from simulated_workspaces import Workspaces, workspaces
from trees_on_cpu import Compiled, Model, nodes

import optimizations
from optimizations import torch_internals
from optimizations.capture.trees import manager as manager_module
from optimizations.capture.trees.containers import managers
from optimizations.capture.trees.function import SELECTED
from optimizations.captured.pools import claim
from optimizations.selection import memory
from optimizations.selection.memory import Borrowed

__all__ = ["cuda_on_cpu", "make", "workspaces"]

BLOCK_BYTES = 4096


@dataclass
class Device:
    reserved: int = 100
    capturing: bool = False
    given_back: list[str] = field(default_factory=list)
    waits: Callable[[], None] = lambda: None

    def emptied(self) -> None:
        """Recordings do that, too."""
        caller = sys._getframe(1)
        if caller.f_globals["__name__"] == memory.__name__:
            self.given_back.append("cached memory")
            self.waits()


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Pools whose last reference of Encore's own went."""
    found: list[Any] = []
    monkeypatch.setattr(torch_internals, "release_pool", lambda device, pool: found.append(pool))
    return found


def test_the_graphs_and_their_pool_go(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    _, compiled = make(plain=5e-6)
    run(compiled, 60)
    (manager,), (node,) = managers(), nodes()
    pool, graph, stocks, seen = manager.cuda_graphs_thread_pool, node.graph, manager.graph, weakref.ref(node)
    freed = weakref.ref(graph), weakref.ref(stocks)
    del node, graph, stocks
    run(compiled, 400)
    assert selection(compiled).kept == "none"
    gc.collect()
    assert (nodes(), seen()) == ([], None)
    assert [one() for one in freed] == [None, None], "each keeps the memory of the pool"
    assert manager.cuda_graphs_thread_pool != pool
    assert selection(compiled).kernels == 1, "what is known of the graph stays"
    captures = cuda_on_cpu.captures
    run(compiled, 50)
    assert (cuda_on_cpu.captures, nodes()) == (captures, [])


def test_results_that_are_held_when_the_graphs_go_keep_their_values(make: Any) -> None:
    _, compiled = make(plain=5e-6)
    run_and_hold(compiled, 460)
    assert selection(compiled).kept == "none"
    assert nodes() == []


def test_a_pool_that_another_function_needs_stays(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    other = Compiled(Model(cuda_on_cpu))
    run(other, 10)
    _, compiled = make(plain=5e-6)
    for _ in range(46):
        run(compiled, 10)
        run(other, 1)
    assert selection(compiled).kept == "none"
    functions = {node.function for node in nodes()}
    assert other.functions[0] in functions
    captures = cuda_on_cpu.captures
    run(other, 20)
    assert cuda_on_cpu.captures == captures


def test_the_pool_goes_with_the_last_function_that_needs_it(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    _, first = make(model=Model(cuda_on_cpu), digest="d" * 64, plain=5e-6)
    _, second = make(model=Model(cuda_on_cpu), digest="e" * 64)
    run(second, 5)
    run(first, 460)
    assert selection(first).kept == "none"
    assert nodes(), "the second one has still to be measured"
    run(second, 700)
    assert (selection(second).kept, nodes()) == ("none", [])


def test_functions_that_are_judged_together_go_together(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    _, first, second = pair(make, cuda_on_cpu, plain=5e-6)
    run_pair(first, second, 500)
    assert selection(second).kept == "none"
    assert nodes() == []


def test_a_verdict_that_becomes_void_records_once_more(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    prices, compiled = make(plain=5e-6)
    run(compiled, 400)
    assert (selection(compiled).kept, nodes()) == ("none", [])
    prices.plain = 50e-6
    cuda_on_cpu.stream = 9
    run(compiled, 3 * RULES.most_calls)
    assert selection(compiled).kept == "copy"
    assert len(nodes()) == 1


def test_a_pool_that_is_left_to_kept_results_is_not_kept_by_stocks_own_graph(
    cuda_on_cpu: CudaOnCpu, released: list[Any]
) -> None:
    compiled = Compiled(Model(cuda_on_cpu))
    run(compiled, 5)
    (manager,) = managers()
    first = weakref.ref(manager.graph)
    manager.leave_pool()
    gc.collect()
    assert first() is None
    second = manager.cuda_graphs_thread_pool
    run(compiled, 5)
    manager.leave_pool()
    gc.collect()
    assert second in released
    run(compiled, 5)


def test_an_inference_that_needs_no_graph_costs_its_manager_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stock pays for a function without a graph, and a count."""
    _, compiled = make(plain=5e-6)
    run(compiled, 400)
    assert selection(compiled).kept == "none"
    monkeypatch.setattr(manager_module.EncoreManager, "run", lambda *arguments: pytest.fail("the manager was asked"))
    calls = compiled.functions[0].uncaptured()[0].calls
    run(compiled, 300)
    assert compiled.functions[0].uncaptured()[0].calls == calls + 300


def test_what_is_measured_without_a_graph_is_what_serves_later(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way past the manager is timed, or a graph would win by what the manager costs."""
    _, compiled = make(plain=5e-6)
    run(compiled, 60)
    assert selection(compiled).state == "measuring"
    reasons = []
    original = manager_module.EncoreManager.run_without_graph

    def noted(self: Any, inputs: Any, function_id: Any, reason: str) -> Any:
        reasons.append(reason)
        return original(self, inputs, function_id, reason)

    monkeypatch.setattr(manager_module.EncoreManager, "run_without_graph", noted)
    run(compiled, 340)
    assert selection(compiled).kept == "none"
    assert reasons == [SELECTED], "the call in which the graphs are freed"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """What PyTorch's allocator has of the device, grown by calls without a graph."""
    made = Device()
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: made.reserved)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.emptied)
    return made


def test_what_measured_calls_took_is_given_back_once_when_graphs_are_kept(make: Any, device: Device) -> None:
    _, compiled = make(plain=20e-6)
    run(compiled, 60)
    assert selection(compiled).state == "measuring"
    device.reserved = 300
    run(compiled, 400)
    assert selection(compiled).kept != "none"
    assert device.given_back == ["cached memory"]


@pytest.mark.parametrize(("plain_s", "taken", "kept"), [(20e-6, 0, "copy"), (5e-6, 200, "none")])
def test_nothing_is_given_back_where_nothing_was_taken_or_calls_go_on_to_need_it(
    make: Any, device: Device, plain_s: float, taken: int, kept: str
) -> None:
    _, compiled = make(plain=plain_s)
    run(compiled, 60)
    device.reserved += taken
    run(compiled, 400)
    assert selection(compiled).kept == kept
    assert device.given_back == []


@pytest.mark.parametrize("ends", ["void", "defect"])
def test_what_measured_calls_took_is_given_back_when_measuring_ends_in_between(
    make: Any, device: Device, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    _, compiled = make(plain=20e-6)
    run(compiled, 60)
    group = compiled.functions[0].member.group
    assert group.state == "measuring"
    device.reserved = 300

    if ends == "void":
        group._wait("circumstances changed")
        run(compiled, 1)
        assert device.given_back == ["cached memory"]
        return
    monkeypatch.setattr(type(group._measurement), "end", lambda *arguments: 1 / 0)
    run(compiled, 20)
    assert (group.state, "ZeroDivisionError" in str(group.reason)) == ("off", True)
    assert device.given_back == ["cached memory"]


@pytest.mark.parametrize("by_hand", [False, True])
def test_workspaces_of_measured_calls_take_no_memory_afterwards(
    workspaces: Workspaces, monkeypatch: pytest.MonkeyPatch, by_hand: bool
) -> None:
    """`by_hand`: the program has captured a graph itself, which may write to one."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: BLOCK_BYTES * len(workspaces.blocks))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    pool = workspaces.new_pool()
    if not by_hand:
        claim(pool)
    workspaces.begin(0, pool)
    workspaces.allocate("a result")
    workspaces.end(0, pool)
    before = torch.cuda.memory_reserved(0)
    borrowed = Borrowed()
    borrowed.begin(0)
    workspaces.use()
    workspaces.in_backward(0, workspaces.use)  # type: ignore[attr-defined]
    workspaces.allocate("an intermediate result").owner = None
    assert torch.cuda.memory_reserved(0) == before + 3 * BLOCK_BYTES
    borrowed.end()
    borrowed.give_back()
    assert torch.cuda.memory_reserved(0) == before + (2 * BLOCK_BYTES if by_hand else 0)


def test_nothing_is_given_back_inside_a_capture(device: Device) -> None:
    borrowed = Borrowed()
    borrowed.begin(0)
    device.reserved, device.capturing = 300, True
    borrowed.give_back()
    assert device.given_back == []


def test_what_calls_of_two_groups_took_is_given_back_when_they_are_one(device: Device) -> None:
    one, other = Borrowed(), Borrowed()
    other.begin(0)
    device.reserved = 300
    one.take_over(other)
    one.end()
    other.end()
    assert (one.due, other.due) == (True, False)
    one.give_back()
    assert device.given_back == ["cached memory"]
    assert not one.due


def test_no_thread_waits_while_memory_is_given_back(make: Any, device: Device) -> None:
    """The device is waited for, and may wait for what another thread has to launch."""
    _, compiled = make(plain=20e-6)
    run(compiled, 60)
    device.reserved = 300
    free: list[bool] = []

    def waits() -> None:
        thread = threading.Thread(target=optimizations.settled)  # takes the lock of all groups
        thread.start()
        thread.join(10)
        free.append(not thread.is_alive())

    device.waits = waits
    run(compiled, 400)
    assert free == [True]
