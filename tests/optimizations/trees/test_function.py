"""One recording per value of the integer inputs; aligned inputs where the function is really run; forgetting."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.work import aligned

from optimizations import torch_internals
from optimizations.graph.plan import Choice
from optimizations.trees import graphed_function as module
from optimizations.trees import maker as maker_module
from optimizations.trees.function import RecordableFunction
from optimizations.trees.graphed_function import GraphedFunction, forget_recordings
from optimizations.trees.maker import EncoreMaker


class FakeRecord:
    """Stands for a manager: runs the function on the first call, then counts."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.replays: list[list[Any]] = []

    def __call__(self, model: RecordableFunction, inputs: list[Any], static: Any, **keywords: Any) -> Any:
        self.made.append({"model": model, "static": static, **keywords})
        outputs = model(inputs)

        def replay(values: list[Any]) -> Any:
            self.replays.append(list(values))
            return model(values)

        return replay, outputs


def total(inputs: list[Any]) -> list[Any]:
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    inputs.clear()
    return [sum(tensors)]


def function_of(record: FakeRecord, model: Callable[..., Any] = total, **keywords: Any) -> GraphedFunction:
    def recordable(aligned: Callable[..., Any]) -> RecordableFunction:
        return RecordableFunction(aligned, model, Choice.AUTO, "inference")

    settings = {"static_input_idxs": (), "mutated_input_idxs": (), **keywords}
    return GraphedFunction(model, recordable, record, **settings)


def test_the_first_call_records_and_later_ones_replay() -> None:
    record = FakeRecord()
    function = function_of(record, static_input_idxs=(1,), device_index=0, stack_traces=[None])
    for start in (1.0, 2.0):
        a, b = torch.full((4,), start), torch.ones(4)
        (result,) = function([a, b])
        assert torch.equal(result, a + b)
    assert len(record.made) == len(record.replays) == 1
    made = record.made[0]
    assert (made["device_index"], made["stack_traces"], made["mutated_input_idxs"]) == (0, [None], ())
    assert list(made["static"]) == [1]


def test_each_value_of_an_integer_input_has_a_recording() -> None:
    record = FakeRecord()
    function = function_of(record)
    for size in (3, 4, 3, 5, 4):
        (result,) = function([size, torch.ones(size)])
        assert torch.equal(result, torch.ones(size))
    assert [len(record.made), len(record.replays)] == [3, 2]


@pytest.mark.parametrize(("sizes", "captured"), [((4,), 4), (((4, 7),), 7)])
def test_sizes_that_are_not_to_be_captured_run_as_they_are(sizes: Any, captured: int) -> None:
    record = FakeRecord()
    function = function_of(record)
    inputs = [4, torch.ones(4)] if captured == 4 else [4, 7, torch.ones(4)]
    with torch_internals.inductor_config.patch({"triton.cudagraph_capture_sizes": sizes}):
        function(list(inputs))
        other = [9, *inputs[1:]]
        (result,) = function_of(record)(other)
    assert torch.equal(result, torch.ones(4))
    assert len(record.made) == 1


def test_function_with_forgotten_recordings_records_again() -> None:
    record = FakeRecord()
    function = function_of(record)
    function([torch.ones(2)])
    forget_recordings()
    function([torch.ones(2)])
    assert (len(record.made), len(record.replays)) == (2, 0)


def test_a_function_dies_with_its_last_reference() -> None:
    function = function_of(FakeRecord())
    function([torch.ones(2)])
    alive = weakref.ref(function)
    gc.disable()
    try:
        del function
        assert alive() is None, "no cycle keeps it"
    finally:
        gc.enable()


def test_misaligned_inputs_are_aligned_where_the_function_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here on a CPU, where Inductor cares for no alignment: it is told to check input 0."""
    trees = torch_internals.cudagraph_trees
    monkeypatch.setattr(trees, "get_input_idxs_to_check", lambda inputs, static: [0])
    seen: list[int] = []

    def writes(inputs: list[Any]) -> list[Any]:
        (tensor,) = inputs
        inputs.clear()
        seen.append(tensor.data_ptr() % 16)
        tensor.add_(1)
        return []

    record = FakeRecord()
    function = function_of(record, writes, mutated_input_idxs=(0,))
    tensor = aligned(8, offset=1)
    function([tensor])
    function([tensor])
    assert seen == [0, 0]
    assert torch.equal(tensor, torch.full((8,), 2.0)), "what was written into the copy is the caller's"


@pytest.mark.parametrize(
    ("backward", "inference", "direction"),
    [(True, False, "backward"), (False, True, "inference"), (False, False, "forward")],
)
def test_the_maker_hands_on_what_inductor_says(
    monkeypatch: pytest.MonkeyPatch, backward: bool, inference: bool, direction: str
) -> None:
    record = FakeRecord()
    monkeypatch.setattr(maker_module.cudagraphify, "record", record)
    reports: list[Any] = []
    made = EncoreMaker(Choice.HOST, reports.append).cudagraphify(
        total,
        (0,),
        is_backward=backward,
        is_inference=inference,
        device_index=3,
        stack_traces=None,
        placeholders=("p",),
    )
    made([torch.ones(2)])
    (entry,) = record.made
    model = entry.pop("model")
    assert (model.choice, model.direction, model.generated) == (Choice.HOST, direction, total)
    assert entry["is_backward"] is backward
    assert (entry["device_index"], entry["placeholders"], entry["mutated_input_idxs"]) == (3, ("p",), ())


def test_live_functions_are_not_kept_alive_by_the_registry() -> None:
    before = len(module._LIVE.alive())
    function = function_of(FakeRecord())
    assert len(module._LIVE.alive()) == before + 1
    del function
    assert len(module._LIVE.alive()) == before
