"""Functions call other functions, and results outlive calls and their functions."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import KNOWN, Compiled, Model, check, nodes, own_container, values
from threads import in_threads

from optimizations import torch_internals
from optimizations.trees import function as function_module
from optimizations.trees import hook, manager, reasons
from optimizations.trees.containers import settled


class Outer:
    """A function with an operator that calls another compiled function."""

    def __init__(self, cuda: CudaOnCpu, inner: Compiled) -> None:
        self.code = KNOWN
        self.inner = inner
        self.last = Model(cuda)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        x, y, w = inputs
        inputs.clear()
        (made,) = self.inner.function([x, y, w])
        return self.last([made, y, w])


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("known", [0, 1, 5])
def test_function_may_call_another_one(cuda_on_cpu: CudaOnCpu, lean: bool, known: int) -> None:
    """`known`: how often the inner one was called before."""
    inner = Compiled(Model(cuda_on_cpu), lean=lean)
    outer = Compiled(Outer(cuda_on_cpu, inner), lean=lean)
    w = values(7)
    for step in range(known):
        inner(values(step), values(step), w)
    for step in range(8):
        x, y = values(step), values(-3 * step)
        assert torch.equal(outer(x, y, w)[0], 2 * (2 * x + y * w) + y * w), step
        inner.checked(y, x, w)
    for compiled in (outer, inner):
        assert [report.direction for report in compiled.reports] == ["inference"]
        assert not compiled.functions[0].uncaptured()
    assert outer.reports[0].kernels == 2


def test_results_referenced_by_threads_do_not_end_graphs(cuda_on_cpu: CudaOnCpu) -> None:
    """The first results are in graph memory and are never released."""
    model, w = Model(cuda_on_cpu), values(7)
    compiled = Compiled(model)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def serve(number: int) -> None:
        for step in range(number, number + (10 if number else 1)):
            x, y = values(step), values(2 * step)
            kept.append((compiled.checked(x, y, w)[0], 2 * x + y * w))

    serve(0)
    for number in range(1, 6):
        in_threads(lambda number=number: serve(number))
    assert all(torch.equal(out, expected) for out, expected in kept)
    assert compiled.uncaptured() == {reasons.KEPT: manager.PATIENCE_OF_THREADS}


def test_iteration_that_begins_during_a_call_overwrites_nothing(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread begins it, without the lock, after the call was checked for live results."""
    first, second = (Compiled(Model(cuda_on_cpu), lean=False) for _ in range(2))
    w, parameters = values(7), manager.EncoreManager._parameters

    def begin_iteration(*arguments: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return parameters(*arguments)

    for step in range(8):
        x, y = values(step), values(2 * step)
        (held,) = first.checked(x, y, w)
        with monkeypatch.context() as patched:
            patched.setattr(manager.EncoreManager, "_parameters", begin_iteration)
            second.checked(y, x, w, mark=False)
        assert torch.equal(held, 2 * x + y * w), step
        del held
    assert not first.uncaptured()


def test_reports_are_made_while_other_threads_record(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """All containers that a report reads grow and shrink meanwhile."""
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, values(7))
    (function,) = compiled.functions
    function.ran_without_graph("a reason")
    report = function_module.CountedCalls

    def noted(*arguments: Any) -> Any:
        function.ran_without_graph(f"reason {len(function._uncaptured)}")
        return report(*arguments)

    monkeypatch.setattr(function_module, "CountedCalls", noted)
    assert [calls.reason for calls in function.uncaptured()] == ["a reason"]

    (node,) = nodes()
    describe = type(node).describe

    def let_go_meanwhile(node: Any) -> Any:
        monkeypatch.setattr(type(node), "describe", describe)
        node.release()
        return describe(node)

    monkeypatch.setattr(type(node), "describe", let_go_meanwhile)
    assert [recording.replays > 0 for recording in function.recordings()] == [True]


def test_reports_are_made_while_other_threads_release(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording is released right after its session was read."""
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, values(7), calls=2)
    (node,) = nodes()

    def read_last(node: Any) -> Any:
        session, node.session = vars(node)["session"], None
        return session

    def put(node: Any, session: Any) -> None:
        vars(node)["session"] = session

    session = node.session
    monkeypatch.setattr(type(node), "session", property(read_last, put), raising=False)
    assert not settled()
    node.session = session
    assert [report.direction for report in compiled.reports] == ["inference"]


@pytest.fixture
def owning(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many results got their own memory, each time."""
    found: list[int] = []
    monkeypatch.setattr(
        torch._C, "_cuda_setCheckpointPoolState", lambda device, state, stale, live: found.append(len(live))
    )
    return found


def held_after(cuda: CudaOnCpu, calls: int) -> tuple[Any, Compiled]:
    """The result of the last of so many calls, and the function."""
    compiled, w, result = Compiled(Model(cuda)), values(7), None
    for step in range(calls):
        del result
        (result,) = compiled.checked(values(step), values(step + 1), w)
    return result, compiled


@pytest.mark.parametrize(
    ("calls", "held", "own_process", "moved"),
    [(6, True, True, [1]), (1, True, True, []), (2, True, True, []), (8, False, True, []), (6, True, False, [])],
    ids=["replayed", "warmed up", "recorded", "dead", "another process"],
)
def test_results_own_their_memory_when_the_last_function_is_gone(
    cuda_on_cpu: CudaOnCpu,
    owning: list[int],
    monkeypatch: pytest.MonkeyPatch,
    calls: int,
    held: bool,
    own_process: bool,
    moved: list[int],
) -> None:
    """Those of warm-ups and recordings have their own from the beginning."""
    result, compiled = held_after(cuda_on_cpu, calls)
    expected, own = result.clone(), os.getpid()
    result = result if held else None
    monkeypatch.setattr(os, "getpid", lambda: own + (not own_process))
    del compiled
    gc.collect()
    assert (own_container(0).tree_manager, owning) == (None, moved)
    assert result is None or torch.equal(result, expected)


def test_failed_copy_is_reported_and_ends_no_graph(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("the pool is in use")

    monkeypatch.setattr(torch._C, "_cuda_setCheckpointPoolState", refused)
    result, compiled = held_after(cuda_on_cpu, 6)
    gc.collect()
    with pytest.warns(UserWarning, match="RuntimeError: the pool is in use"):
        del compiled
    assert own_container(0).tree_manager is None
    assert result is not None


@pytest.mark.parametrize("read", ["data_ptrs_dead_since_invocation", "_cuda_getCheckpointState"])
def test_result_that_another_thread_releases_is_freed_once(
    cuda_on_cpu: CudaOnCpu, owning: list[int], monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """It dies while a function after it is recorded, right before this is called."""
    second = Compiled(Model(cuda_on_cpu))
    second(values(1), values(2), values(3))
    results, compiled = [], Compiled(Model(cuda_on_cpu))
    for step in range(6):
        results[:] = []
        results[:] = compiled.checked(values(step), values(step + 1), values(7))
    owner: Any = torch._C if hasattr(torch._C, read) else manager.EncoreNode
    reads, freed = getattr(owner, read), list[int]()

    def after_a_release(*arguments: Any) -> Any:
        in_threads(results.clear)
        return reads(*arguments)

    monkeypatch.setattr(owner, read, after_a_release)
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", freed.append)
    second.checked(values(1), values(2), values(3), mark=False)
    assert not results
    assert (owning, freed) == ([1], [])
    recorded: Any = own_container(0).tree_manager.current_node  # type: ignore[union-attr]
    assert recorded.recorded_liveness_after_graph[0] == [(0, 0) in recorded.live_indices_after_graph]


@pytest.mark.parametrize("threads", [1, 2])
def test_warm_up_keeps_its_inputs_if_several_threads_call(cuda_on_cpu: CudaOnCpu, threads: int) -> None:
    """Else another thread would get their memory while the GPU reads it on the stream of the warm-up."""
    alive: list[bool] = []

    class Looks(Model):
        def __call__(self, inputs: list[Any]) -> list[Any]:
            x = weakref.ref(inputs[0])
            results = super().__call__(inputs)
            alive.append(x() is not None)
            return results

    other, compiled = Compiled(Model(cuda_on_cpu)), Compiled(Looks(cuda_on_cpu))
    other(values(1), values(2), values(3))
    if threads > 1:
        in_threads(lambda: other(values(1), values(2), values(3)))
    compiled.function([values(1), values(2), values(7)])
    assert alive == [threads > 1]


@pytest.mark.parametrize("begins", [True, False])
def test_iteration_that_begins_inside_a_function_ends_no_result(cuda_on_cpu: CudaOnCpu, begins: bool) -> None:
    """Stock's code runs the outer function, as it writes an input; another thread begins the iteration meanwhile."""
    inner = Compiled(Model(cuda_on_cpu), lean=False)
    w = values(7)
    check(inner, w)

    class CallsTwice(Model):
        def __call__(self, inputs: list[Any]) -> list[Any]:
            x, y, w = inputs
            inputs.clear()
            (first,) = inner.function([x, y, w])
            if begins:
                torch.compiler.cudagraph_mark_step_begin()
            (second,) = inner.function([y, x, w])
            return [first + second]

    writes = {"is_inference": False, "is_backward": True, "mutated_input_idxs": (0,)}
    outer = Compiled(CallsTwice(cuda_on_cpu), **writes)
    for step in range(6):
        x, y = values(step), values(-3 * step)
        assert torch.equal(outer(x, y, w)[0], 2 * x + y * w + 2 * y + x * w), step
    assert outer.uncaptured() == {reasons.WRITES_INPUT: 6}


def test_marks_are_made_while_others_are_looked_through(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call inside of another manager's function marks what it returns without a lock."""
    one, made = manager.EncoreManager(0), [torch.ones(1) for _ in range(3)]
    one.mark_uncaptured(made[:1], ())
    reference: Any = torch_internals.cudagraph_trees.StorageWeakRef
    expired = reference.expired

    def marks_another(mark: Any) -> Any:
        monkeypatch.setattr(reference, "expired", expired)
        one.mark_uncaptured(made[1:2], ())
        return expired(mark)

    monkeypatch.setattr(reference, "expired", marks_another)
    one.mark_uncaptured(made[2:], ())
    assert all(one.has_uncaptured_forward([each]) for each in made)


def test_failed_warm_up_raises_though_another_thread_runs_it(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other call goes past the manager: it is made while a step is captured."""

    class Fails(Model):
        def __call__(self, inputs: list[Any]) -> list[Any]:
            if threading.current_thread() is not caller or not held:
                return super().__call__(inputs)
            monkeypatch.setattr(hook, "at_rest_now", 1)
            in_threads(lambda: found.append(compiled.function([y, x, w])[0]))
            raise torch.OutOfMemoryError("no memory")

    caller, found, held = threading.current_thread(), [], []
    x, y, w = values(1), values(2), values(7)
    compiled = Compiled(Fails(cuda_on_cpu), lean=False)
    held += compiled.function([x, y, w])
    every_call = torch_internals.inductor_config.patch({"triton.force_cudagraphs_warmup": True})
    with every_call, pytest.raises(torch.OutOfMemoryError):
        compiled.function([x, y, w])
    assert torch.equal(found[0], 2 * y + x * w)


def test_timeout_after_a_recording_does_not_run_it_twice(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of signals raises when the wait for the GPU has ended."""
    compiled = Compiled(Model(cuda_on_cpu, writes_w=True), mutated_input_idxs=(2,))
    x, y, w = values(1), values(2), values(7)
    compiled.checked(x, y, w)

    def wait(*_: Any) -> None:
        if nodes():
            raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "synchronize", wait)
        with pytest.raises(TimeoutError):
            compiled.function([x, y, w])
    assert torch.equal(w, values(9))
    compiled.checked(x, y, w)
    assert torch.equal(w, values(10))
    assert not compiled.uncaptured()
