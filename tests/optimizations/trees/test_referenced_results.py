"""Results that a program references in some iterations only stay valid and raise no error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import interrupted_after
from simulated_gpu.compiler import CompiledOnCpu
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, check, nodes, values

import optimizations
from optimizations.trees import results as results_module
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
