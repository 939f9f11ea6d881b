"""Lines that a refusal names: those that read a value, change it, or lead into a library."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice

from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.source_lines import BINDS, GROWS, STEPS, line_with

LIBRARIES = {
    "utils/loop.py": ("edge_index[:, edge_index[0] != edge_index[1]]", "add_self_loops=False"),
    "utils/_scatter.py": ("torch.zeros(int(edge_index.max()) + 1)", "size= of a pool"),
    "utils/num_nodes.py": ("int(edge_index.max()) + 1", "num_nodes="),
}


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("file", sorted(LIBRARIES))
def test_graph_library_has_its_own_advice(file: str) -> None:
    code, advice = LIBRARIES[file]
    installed = f"/somewhere/lib/python3/site-packages/torch_geometric/{file}"
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(f"def of_the_library(edge_index): return {code}", installed, "exec"), scope)  # noqa: S102
    of_the_library = scope["of_the_library"]

    def step(edge_index: torch.Tensor) -> torch.Tensor:
        of_the_library(edge_index)
        return edge_index.sum()

    graphed = GraphedStep(step, device=CpuDevice())
    for index in range(4):
        graphed(torch.tensor([[0, 1, 2], [1, 2, index % 3]]))
    (refusal,) = graphed.report().refusals
    assert advice in refusal.advice
    assert refusal.source_line is not None and f"through torch_geometric/{file}:1" in refusal.source_line


# Lines that are looked for in the source of a step once it is refused.

source: Any = None
scheduler: Any = None
trainer: Any = None


def reads_it_twice() -> Any:
    first = next(source)
    return first, next(source)


def changes_it() -> None:
    if trainer.count == 3:
        trainer.losses.append(trainer.count)
    trainer.count += 1
    scheduler.step()


def line_in(function: types.FunctionType, behind: int) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + behind} in {code.co_name}"


@pytest.mark.parametrize("path", ["source", "trainer.source", "source[0]", "source (2)"])
def test_first_line_that_names_a_value_is_found(path: str) -> None:
    assert line_with([changes_it.__code__, reads_it_twice.__code__], path) == line_in(reads_it_twice, 1)


@pytest.mark.parametrize(
    ("path", "then", "behind"), [("count", BINDS, 3), ("trainer.losses", GROWS, 2), ("scheduler", STEPS, 4)]
)
def test_line_that_changes_a_value_is_found(path: str, then: str, behind: int) -> None:
    assert line_with([reads_it_twice.__code__, changes_it.__code__], path, then) == line_in(changes_it, behind)


def test_value_that_no_line_names_has_none() -> None:
    assert line_with([reads_it_twice.__code__], "other") is None
