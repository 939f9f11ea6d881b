"""Inductor compiling CPU programs as if they were CUDA ones, so that it wants CUDA graphs of them.

Everything from `compile_fx` to `post_compile` then runs as for a GPU, up to whoever makes the graphs, which is a fake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from optimizations import torch_internals

WEIGHT = torch.eye(8) * 2


def program(x: torch.Tensor) -> torch.Tensor:
    """Only calls of a library, so that nothing has to be compiled by a C++ compiler."""
    return torch.mm(x, WEIGHT)


def other_program(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(torch.mm(x, WEIGHT), WEIGHT)


class FakeMaker:
    """Notes what it is asked to make graphs of, and lets it run as it is."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.calls = 0
        self.managers: list[int] = []
        self.graphed: list[bool] = []

    def cudagraphify(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        self.made.append({**dict(zip(("static_input_idxs",), args, strict=False)), **kwargs})

        def run(inputs: list[Any]) -> Any:
            self.calls += 1
            return model(inputs)

        return run

    def get_manager(self, device_index: int, create_if_none_exists: bool = True) -> Any:
        self.managers.append(device_index)
        return self

    def compiled(self, compiled_graph: Any, *, graphed: bool) -> None:
        self.graphed.append(graphed)

    @property
    def directions(self) -> list[str]:
        return [
            "backward" if one["is_backward"] else "inference" if one["is_inference"] else "forward" for one in self.made
        ]


@pytest.fixture
def cuda_in_disguise(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMaker]:
    """Inductor takes CPU programs for CUDA ones. Yields what stands in stock's place."""
    stock = FakeMaker()
    monkeypatch.setattr(torch_internals.cudagraph_utils, "check_lowering_disable_cudagraph", lambda mapping: None)
    monkeypatch.setattr(torch_internals.compile_fx, "cudagraphify", stock.cudagraphify)
    monkeypatch.setattr(torch_internals.cudagraph_trees, "get_manager", stock.get_manager)
    graph_class = torch_internals.CompiledFxGraph
    init = graph_class.__init__

    def on_a_gpu(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.device_idxs.add(0)

    monkeypatch.setattr(graph_class, "__init__", on_a_gpu)
    torch_internals.reset_dynamo()
    with torch_internals.fresh_cache():
        yield stock
    torch_internals.reset_dynamo()
