"""A function has one recording per value of its integer inputs, and aligned inputs where it really runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.allocator import aligned

from optimizations import torch_internals
from optimizations.options import Options
from optimizations.trees import graphed_function
from optimizations.trees.function import RecordableFunction
from optimizations.trees.graphed_function import GraphedFunction


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


@pytest.fixture(autouse=True)
def record(monkeypatch: pytest.MonkeyPatch) -> FakeRecord:
    made = FakeRecord()
    monkeypatch.setattr(graphed_function, "record", made)
    return made


def function_of(model: Callable[..., Any] = total, **keywords: Any) -> GraphedFunction:
    settings = {"device_index": 0, **keywords}
    return GraphedFunction(model, Options(selection="off"), lambda function: None, "inference", **settings)


def test_each_value_of_an_integer_input_has_a_recording(record: FakeRecord) -> None:
    function = function_of()
    for size in (3, 4, 3, 5, 4):
        (result,) = function([size, torch.ones(size)])
        assert torch.equal(result, torch.ones(size))
    assert [len(record.made), len(record.replays)] == [3, 2]


@pytest.mark.parametrize(("sizes", "captured"), [((4,), 4), (((4, 7),), 7)])
def test_excluded_sizes_run_uncaptured(record: FakeRecord, sizes: Any, captured: int) -> None:
    function = function_of()
    inputs = [4, torch.ones(4)] if captured == 4 else [4, 7, torch.ones(4)]
    with torch_internals.inductor_config.patch({"triton.cudagraph_capture_sizes": sizes}):
        function(list(inputs))
        other = [9, *inputs[1:]]
        (result,) = function_of()(other)
    assert torch.equal(result, torch.ones(4))
    assert len(record.made) == 1


def test_misaligned_inputs_are_aligned_where_the_function_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor checks no alignment on a CPU, so the test passes input 0 as one to check."""
    trees = torch_internals.cudagraph_trees
    monkeypatch.setattr(trees, "get_input_idxs_to_check", lambda inputs, static: [0])
    seen: list[int] = []

    def writes(inputs: list[Any]) -> list[Any]:
        (tensor,) = inputs
        inputs.clear()
        seen.append(tensor.data_ptr() % 16)
        tensor.add_(1)
        return []

    function = function_of(writes, mutated_input_idxs=(0,))
    tensor = aligned(8, offset=1)
    function([tensor])
    function([tensor])
    assert seen == [0, 0]
    assert torch.equal(tensor, torch.full((8,), 2.0)), "what was written into the copy is the caller's"
