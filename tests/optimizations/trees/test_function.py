"""One recording per value of the integer inputs; aligned inputs where the function is really run; forgetting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize(("sizes", "captured"), [((4,), 4), (((4, 7),), 7)])
def test_sizes_that_are_not_to_be_captured_run_as_they_are(record: FakeRecord, sizes: Any, captured: int) -> None:
    function = function_of()
    inputs = [4, torch.ones(4)] if captured == 4 else [4, 7, torch.ones(4)]
    with torch_internals.inductor_config.patch({"triton.cudagraph_capture_sizes": sizes}):
        function(list(inputs))
        other = [9, *inputs[1:]]
        (result,) = function_of()(other)
    assert torch.equal(result, torch.ones(4))
    assert len(record.made) == 1
