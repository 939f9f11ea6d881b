"""Results that replays hand out again: what callers may have done to them is found, whatever surrounds the call."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from optimizations import torch_internals
from optimizations.report.recordings import Direction
from optimizations.torch_internals.tensor_guard import FEW
from optimizations.trees import handed_out as handed_out_module
from optimizations.trees.handed_out import FIRST_CALLS, MOST_LAID_OUT, HandedOut

CHANGES: list[Callable[[torch.Tensor], Any]] = [
    lambda y: y.t_(),
    lambda y: y.unsqueeze_(0),
    lambda y: y.requires_grad_(),
    lambda y: y.mul_(torch.ones(1, requires_grad=True)),
    lambda y: y.set_(torch.zeros(2, 3)),
    lambda y: setattr(y, "data", torch.zeros(2, 3)),
    lambda y: setattr(y, "data", y.data[:1]),
    lambda y: setattr(y, "__class__", type("Sub", (torch.Tensor,), {})),
    lambda y: setattr(y, "name_of_the_callers_own", 1),
    lambda y: setattr(y, "grad", torch.zeros(2, 3)),
    lambda y: (y.requires_grad_(), y.sum().backward(), y.requires_grad_(False)),
    lambda y: (y.requires_grad_(), y.register_hook(torch.neg), y.detach_()),
]
if hasattr(torch.Tensor, "rename_"):  # PyTorch 2.13 removed names of dimensions
    CHANGES.append(lambda y: y.rename_("a", "b"))


@pytest.mark.parametrize("direction", ["inference", "backward"])
@pytest.mark.parametrize("calls", [0, FIRST_CALLS + 2])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_caller_did_beyond_values_is_found(
    change: Callable[[torch.Tensor], Any], calls: int, direction: Direction
) -> None:
    results = [torch.zeros(2, 3), None, torch.ones(2, 3)]
    handed_out = HandedOut(results, direction)
    for _ in range(calls):
        assert results[0] is not None
        results[0].add_(1)
        assert handed_out.changed(results) == []
    change(results[2])  # type: ignore[arg-type]
    assert handed_out.changed(results) == [2]


@pytest.mark.parametrize("direction", ["inference", "backward"])
@pytest.mark.parametrize("calls", [0, FIRST_CALLS + 2])
def test_a_weak_reference_is_found_while_it_is_there(calls: int, direction: Direction) -> None:
    results: list[Any] = [torch.zeros(2, 3), None, torch.ones(2, 3)]
    handed_out = HandedOut(results, direction)
    for _ in range(calls):
        assert handed_out.changed(results) == []
    references = [weakref.ref(results[2])]
    assert handed_out.changed(results) == [2]
    references.clear()
    assert handed_out.changed(results) == []


@pytest.mark.parametrize("direction", ["inference", "forward", "backward"])
@pytest.mark.parametrize("count", [1, FEW + 1])
def test_aotautograds_marks_are_removed_without_a_copy(direction: Direction, count: int) -> None:
    results: list[Any] = [torch.zeros(2, 3) for _ in range(count)]
    handed_out = HandedOut(results, direction)
    for _ in range(FIRST_CALLS + 3):
        assert handed_out.changed(results) == []
        assert not any(map(vars, results))
        for result in results:
            vars(result).update({mark: {0} for mark in torch_internals.DYNAMIC_MARKS})
    results[-1].name_of_the_callers_own = 1
    assert handed_out.changed(results) == [count - 1]
    del results[-1].name_of_the_callers_own
    results[-1].t_()
    assert handed_out.changed(results) == [count - 1]


def test_the_mark_is_the_one_that_aotautograd_sets() -> None:
    results = []
    compiled = torch.compile(lambda x: x + 1, backend="aot_eager", dynamic=True)
    for size in (3, 5):
        results.append(compiled(torch.ones(size, 2)))
    assert [list(vars(result).values()) for result in results] == [[{0, 1}]] * 2
    assert all(torch_internals.DYNAMIC_MARKS.issuperset(vars(result)) for result in results)


def test_what_surrounds_a_call_changes_nothing() -> None:
    results = [torch.zeros(2, 3)]
    handed_out = HandedOut(results, "inference")
    for _ in range(FIRST_CALLS + 2):
        for surroundings in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
            with surroundings:
                assert handed_out.changed(results) == []
    results[0].t_()
    with torch.inference_mode():
        assert handed_out.changed(results) == [0]


def test_history_of_the_previous_call_is_no_change() -> None:
    results = [torch.zeros(2, 3)]
    trained, not_trained = (HandedOut(results, "forward"), HandedOut(results, "inference"))
    results[0].mul_(torch.ones(1, requires_grad=True))
    for _ in range(FIRST_CALLS + 2):
        assert trained.changed(results) == []
        assert not_trained.changed(results) == [0]


@pytest.mark.parametrize("calls", [0, FIRST_CALLS + 2])
@pytest.mark.parametrize("attach", [lambda y: y.retain_grad(), lambda y: setattr(y, "name_of_the_callers_own", 1)])
def test_what_is_attached_to_a_result_with_a_history_is_found(
    attach: Callable[[torch.Tensor], Any], calls: int
) -> None:
    saved, made = torch.ones(2, 3), torch.zeros(2, 3)
    handed_out = HandedOut([saved, made], "forward")
    made.mul_(torch.ones(1, requires_grad=True))
    for _ in range(calls + 1):
        assert handed_out.changed([saved, made]) == []
    attach(made)
    assert handed_out.changed([saved, made]) == [1]


@pytest.mark.parametrize("calls", [0, FIRST_CALLS + 2])
@pytest.mark.parametrize(
    "attach",
    [
        lambda y: setattr(y, "name_of_the_callers_own", 1),
        lambda y: setattr(y, "grad", torch.ones(2, 3)),
        lambda y: (y.requires_grad_(), y.sum().backward(), y.requires_grad_(False)),
    ],
)
def test_forward_outputs_without_history_are_checked(attach: Callable[[torch.Tensor], Any], calls: int) -> None:
    for seen, found in ((None, [1, 2]), ((0, 1), [1]), ((0, 2), [2])):
        results = [torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(2, 3)]
        handed_out = HandedOut(results, "forward", seen)
        results[0].mul_(torch.ones(1, requires_grad=True))
        for _ in range(calls + 1):
            assert handed_out.changed(list(results)) == []
        attach(results[1])
        attach(results[2])
        assert handed_out.changed(list(results)) == found
        assert handed_out.asks_some == (seen is not None)
        handed_out.ask_all()
        assert handed_out.changed(list(results)) == [1, 2]


def test_nothing_that_was_handed_out_is_held() -> None:
    results = [torch.zeros(2, 3)]
    before = sys.getrefcount(results[0])
    handed_out = HandedOut(results, "inference")
    for _ in range(FIRST_CALLS + 2):
        assert handed_out.changed(results) == []
    after = sys.getrefcount(results[0])
    assert after == before


def test_looks_that_keep_changing_are_not_laid_out_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out: list[int] = []
    same_metadata = handed_out_module.same_metadata_of_each
    monkeypatch.setattr(
        handed_out_module,
        "same_metadata_of_each",
        lambda tensors: (laid_out.append(len(tensors)), same_metadata(tensors))[1],
    )
    results = [torch.zeros(2, 3) for _ in range(4)]
    handed_out = HandedOut(results, "forward")
    for call in range(40):
        for number, result in enumerate(results):
            result.detach_()
            if (call >> number) & 1:
                result.mul_(torch.ones(1, requires_grad=True))
        assert handed_out.changed(results) == []
    assert len(laid_out) == MOST_LAID_OUT
    results[1].t_()
    assert handed_out.changed(results) == [1]


@pytest.mark.parametrize("count", [1, FEW, FEW + 1])
def test_few_results_and_many_are_looked_at_alike(count: int) -> None:
    results = [torch.zeros(2, 3) for _ in range(count)]
    handed_out = HandedOut(results, "inference")
    for _ in range(FIRST_CALLS + 2):
        assert handed_out.changed(results) == []
    results[-1].t_()
    assert handed_out.changed(results) == [count - 1]
    results[-1].t_()
    assert handed_out.changed(results) == []


class Saving(torch.autograd.Function):
    """Saves a tensor that is neither its argument nor its result, as AOTAutograd's functions do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(saved)
        return x * 2

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tangent * 2, None


def test_what_a_forward_saves_can_be_reached_and_is_looked_at() -> None:
    """Hooks of saved tensors get the very object, and autograd's node gives it out."""
    results: list[torch.Tensor | None] = [torch.zeros(2, 3), torch.ones(2, 3)]
    handed_out = HandedOut(results, "forward")
    x, given = torch.ones(2, requires_grad=True), []
    for _ in range(FIRST_CALLS + 2):
        assert handed_out.changed(results) == []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (given.append(tensor), tensor)[1], lambda one: one
        ):
            Saving.apply(x, results[1])
    assert len(given) == FIRST_CALLS + 2 and all(tensor is results[1] for tensor in given)
    out = Saving.apply(x, results[1])
    assert out.grad_fn.saved_tensors[0] is results[1]
    out.grad_fn.saved_tensors[0].data = torch.ones(2, 3)
    assert handed_out.changed(results) == [1]
