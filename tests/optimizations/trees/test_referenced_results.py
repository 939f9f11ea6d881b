"""Results that a program references in some iterations only stay valid and raise no error."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import interrupted_after
from simulated_gpu.compiler import CompiledOnCpu
from simulated_gpu.runtime import CudaOnCpu, CurrentStream
from simulated_gpu.trees import KNOWN, Compiled, Model, check, nodes, own_container, values
from threads import in_threads
from torch.multiprocessing.reductions import StorageWeakRef

import optimizations
from optimizations import torch_internals
from optimizations.trees import function as function_module
from optimizations.trees import hook, manager, reasons
from optimizations.trees import results as results_module
from optimizations.trees.containers import settled
from optimizations.trees.results import CopiesOut

CALLS = 40
MOST_HELD = 6


class Held:
    """Results that the program has not dropped, each with what it was."""

    def __init__(self) -> None:
        self.values: list[tuple[Any, torch.Tensor]] = []
        self.storages: list[tuple[Any, int, torch.Tensor]] = []

    def check(self, step: int) -> None:
        for value, expected in self.values:
            assert torch.equal(value, expected), step
        for storage, offset, expected in self.storages:
            assert torch.equal(torch.empty(0).set_(storage, offset, expected.shape, (1,)), expected), step
        for held in (self.values, self.storages):
            if len(held) > MOST_HELD:
                held.clear()


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("every", [3, 6, 15])
@pytest.mark.parametrize("others", [0, 5])
def test_storage_of_a_result_is_retained(
    cuda_on_cpu: CudaOnCpu, marks: bool, lean: bool, every: int, others: int
) -> None:
    """This holds for few results and for many, which are checked together."""

    def several(inputs: list[Any]) -> list[Any]:
        given = [list(inputs) for _ in models]
        inputs.clear()
        return [result for model, own in zip(models, given, strict=True) for result in model(own)]

    models = [Model(cuda_on_cpu) for _ in range(1 + others)]
    compiled = Compiled(several, outputs=len(models), lean=lean)
    w, held = values(7), Held()
    for step in range(CALLS):
        x, y = values(step), values(2 * step)
        results = compiled.checked(x, y, w, mark=marks)
        if step % every == every - 1:
            storage = results[0].untyped_storage()
            held.storages.append((storage, int(results[0].storage_offset()), 2 * x + y * w))
        results.clear()
        held.check(step)
    assert cuda_on_cpu.replays


@pytest.mark.parametrize("marks", ["each", "once", "never"])
@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("every", [3, 6, 15])
@pytest.mark.parametrize("mostly", [True, False])
@pytest.mark.parametrize("chained", [True, False])
def test_result_may_be_retained_in_some_iterations(
    cuda_on_cpu: CudaOnCpu, marks: str, lean: bool, every: int, mostly: bool, chained: bool
) -> None:
    """It was dead or alive at the recording. `chained`: the second graph reads the first one's result."""
    first, second = (Compiled(Model(cuda_on_cpu), lean=lean) for _ in range(2))
    w, held = values(7), Held()
    for step in range(CALLS):
        x, y = values(step), values(2 * step)
        keeps = (step % every == every - 1) != mostly
        for function in (first, second):
            marked = function is first and (marks == "each" or (marks == "once" and step == 5))
            (result,) = function.checked(x, y, w, mark=marked)
            if keeps:
                held.values.append((result, result.clone()))
            x = result if chained else x
            del result
        del x
        held.check(step)


def test_interrupt_while_creating_results_affects_one_call(cuda_on_cpu: CudaOnCpu) -> None:
    """The first replay creates them. A partial list must not be taken for the whole, or each later call raises."""
    w = values(7)
    for number in range(90):
        compiled = Compiled(Model(cuda_on_cpu))
        for step in range(2):
            compiled(values(step), values(2), w)
        with (
            interrupted_after(number, "/trees/results.py", "_inductor/cudagraph_trees.py") as where,
            contextlib.suppress(KeyboardInterrupt),
        ):
            compiled(values(2), values(2), w)
        held = Held()
        for step in range(3, 9):
            (result,) = compiled.checked(values(step), values(2), w)
            expected = result.clone()
            result.requires_grad_()  # it is made again for the next call
            if step == 5:
                held.values.append((result, expected))
            held.check(step)
            assert not compiled(values(step), values(2), w)[0].requires_grad, where
        optimizations.reset()
        if not where:
            break
    assert number > 3, "nothing was interrupted"
    assert not where


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("views", [True, False])
def test_retained_results_without_memory_are_passed(
    compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch, lean: bool, views: bool
) -> None:
    """The graph has run and written its inputs: after an error the program would repeat that."""
    refused: list[int] = []

    def refusing(copy: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def copied(source: Any) -> Any:
            if step > 20 and step % 3 == 2:
                refused.append(step)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return copy(source)

        return copied

    monkeypatch.setattr(torch.Tensor, "clone", refusing(torch.Tensor.clone))
    monkeypatch.setattr(torch.UntypedStorage, "clone", refusing(torch.UntypedStorage.clone))

    def counted(x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count.add_(1)
        y = x.sin() * count
        return (y, y[1:]) if views else (y,)

    run = torch.compile(counted, backend="encore", options={"lean": lean})
    count, held = torch.zeros(4), Held()
    with torch.no_grad():
        for step in range(60):
            x = torch.full((4,), float(step))
            expected = x.sin() * (step + 1)
            found = run(x, count)
            assert torch.equal(count, torch.full((4,), step + 1.0)), step
            held.values += list(zip(found, (expected, expected[1:]), strict=False))
            held.check(step)
    assert len(refused) > 5


@pytest.mark.parametrize("lean", [True, False])
def test_layout_of_retained_copies_is_computed_once(
    compiled_on_cpu: CompiledOnCpu, monkeypatch: pytest.MonkeyPatch, lean: bool
) -> None:
    laid_out: list[int] = []

    def laying_out(found: list[Any], kept: set[int], pool: set[int]) -> CopiesOut:
        laid_out.append(len(kept))
        return CopiesOut(found, kept, pool)

    monkeypatch.setattr(results_module, "CopiesOut", laying_out)
    run = torch.compile(lambda x: (x.sin(), x.cos()), backend="encore", options={"lean": lean})
    first, second = Held(), Held()
    with torch.no_grad():
        for step in range(60):
            x = torch.full((4,), float(step))
            found = run(x)
            first.values.append((found[0], x.sin()))
            if step > 30:
                second.values.append((found[1], x.cos()))
            del found
            first.check(step)
            second.check(step)
    assert laid_out == [1, 2]
    (report,) = optimizations.report()
    (kept,) = report.kept
    assert kept.outputs == (0, 1)
    assert kept.copied_bytes == 16 * kept.copies
    assert kept.copies > 60


def pool_of(results: list[torch.Tensor]) -> set[int]:
    """Treat these results as graph memory."""
    return {one.untyped_storage().data_ptr() for one in results}


@pytest.mark.parametrize("kept", [{0}, {1}, {0, 1, 2}])
def test_results_that_share_memory_share_a_copy(kept: set[int]) -> None:
    def returned(start: float) -> list[torch.Tensor]:
        whole = torch.arange(6.0) + start
        view = whole[2:4]
        return [whole, view, view, torch.full((2,), start)]

    results = returned(0.0)
    copies = CopiesOut(results, kept, pool_of(results))
    assert (copies.count, copies.bytes) == (1, 24)
    for start in (10.0, 20.0):
        given = returned(start)
        handed = list(given)
        copies.make(handed)
        assert [one.tolist() for one in handed] == [one.tolist() for one in given]
        assert handed[1] is handed[2]
        assert handed[0].untyped_storage().data_ptr() == handed[1].untyped_storage().data_ptr()
        assert handed[0].data_ptr() != given[0].data_ptr()
        assert handed[3] is given[3]


def test_result_with_gaps_is_copied_with_its_whole_memory() -> None:
    results = [torch.arange(8.0)[::2]]
    copies = CopiesOut(results, {0}, pool_of(results))
    handed = [(torch.arange(8.0) + 3)[::2]]
    copies.make(handed)
    assert handed[0].tolist() == [3, 5, 7, 9]
    assert handed[0].stride() == (2,)


def test_interrupt_never_frees_a_reference_to_a_result_twice(cuda_on_cpu: CudaOnCpu) -> None:
    class ReturnsTwice(Model):
        def __call__(self, inputs: list[Any]) -> list[Any]:
            return 2 * super().__call__(inputs)

    compiled, w = Compiled(ReturnsTwice(cuda_on_cpu), outputs=2), values(7)
    check(compiled, w)
    (node,) = nodes()
    freed: list[int] = []

    def free(reference: int) -> None:
        freed.append(reference)
        if len(freed) == 1:
            raise KeyboardInterrupt

    node.outputs_weakrefs[1].ref._free_weak_ref = free
    with pytest.raises(KeyboardInterrupt):
        compiled.checked(values(1), values(2), w)
    for step in range(4):
        compiled.checked(values(step), values(3), w)
    assert len(set(freed)) == len(freed) > 1


# Functions call other functions, and results outlive calls and their functions.


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
    """Results of warm-ups and recordings own their memory from the beginning."""
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
    second, w = Compiled(Model(cuda_on_cpu)), values(7)
    second(values(1), values(2), w)
    results, compiled = [], Compiled(Model(cuda_on_cpu))
    for step in range(6):
        results[:] = []
        results[:] = compiled.checked(values(step), values(step + 1), w)
    owner: Any = torch._C if hasattr(torch._C, read) else manager.EncoreNode
    reads, freed = getattr(owner, read), list[int]()

    def after_a_release(*arguments: Any) -> Any:
        in_threads(results.clear)
        return reads(*arguments)

    monkeypatch.setattr(owner, read, after_a_release)
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", freed.append)
    second.checked(values(1), values(2), w, mark=False)
    assert not results
    assert (owning, freed) == ([1], [])
    recorded: Any = own_container(0).tree_manager.current_node  # type: ignore[union-attr]
    assert recorded.recorded_liveness_after_graph[0] == [(0, 0) in recorded.live_indices_after_graph]


@pytest.mark.parametrize("fails", [False, True])
def test_warm_up_keeps_its_inputs(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Else another thread would get their memory while the GPU reads it on the stream of the warm-up."""
    alive: list[bool] = []

    class Looks(Model):
        def __call__(self, inputs: list[Any]) -> list[Any]:
            x = StorageWeakRef(inputs[0].untyped_storage())
            results = super().__call__(inputs)
            monkeypatch.setattr(CurrentStream, "wait_stream", lambda *_: alive.append(not x.expired()))
            if fails:
                raise ValueError
            return results

    with pytest.raises(ValueError) if fails else contextlib.nullcontext():
        Compiled(Looks(cuda_on_cpu)).function([values(1), values(2), values(7)])
    assert set(alive) == {True}


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


@pytest.mark.parametrize(("interrupted", "kept"), [("__call__", True), ("run_first_inputs", False)])
def test_results_own_memory_once_if_a_recording_is_interrupted(
    cuda_on_cpu: CudaOnCpu, owning: list[int], monkeypatch: pytest.MonkeyPatch, interrupted: str, kept: bool
) -> None:
    """A function is interrupted after a replay: in its capture, or when its graph has run and its results are there."""
    first, second, w = Compiled(Model(cuda_on_cpu)), Compiled(Model(cuda_on_cpu)), values(7)
    second(values(1), values(2), w)
    check(first, w, calls=6)
    results = first.checked(values(1), values(2), w)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Model if kept else manager.EncoreNode, interrupted, interrupt)
        second.checked(values(1), values(2), w, mark=False)
    if not kept:
        results.clear()
    for step in range(8):
        first.checked(values(step), values(3), w)
        second.checked(values(step), values(3), w, mark=False)
    assert owning == [1]
    assert bool(first.uncaptured()) is kept
