"""Run programs of `torch.compile` with CUDA graphs that pay off, on the stock PyTorch wheel.

`torch.compile(model, backend="encore")` compiles a model; `graph_step` makes one CUDA graph of a whole training step,
`graph_callables` one each of modules and functions, in the order of a schedule.
`Options` documents what `options={...}` takes, `report` tells what was done with each graph, `explain` tells it
beforehand, `reset` forgets and frees.
Importing this package imports no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from optimizations.options import Options, WrongOption
from optimizations.report import GraphReport, recordings, report
from optimizations.report.steps import Refusal, StepChanged, StepRefused, StepReport, WrongOrder
from optimizations.torch_internals import UnsupportedTorch

if TYPE_CHECKING:
    from optimizations.capture.callables.graph_callables import graph_callables
    from optimizations.capture.static_loader import static_loader
    from optimizations.capture.step.graphed_step import graph_step
    from optimizations.report.explanation import explain

__all__ = [
    "GraphReport",
    "Options",
    "Refusal",
    "StepChanged",
    "StepRefused",
    "StepReport",
    "UnsupportedTorch",
    "WrongOption",
    "WrongOrder",
    "explain",
    "graph_callables",
    "graph_step",
    "recordings",
    "report",
    "reset",
    "settled",
    "static_loader",
]


_LOADED_WHEN_USED = {
    "explain": "optimizations.report.explanation",
    "graph_callables": "optimizations.capture.callables.graph_callables",
    "graph_step": "optimizations.capture.step.graphed_step",
    "static_loader": "optimizations.capture.static_loader",
}
"""Functions whose modules import torch."""


def __getattr__(name: str) -> Any:
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module 'optimizations' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LOADED_WHEN_USED[name]), name)
    return value


def settled() -> bool:
    """Return whether every recorded graph is in its final state: no plan is pending, and no race runs.

    A graph that is not called any more never settles.
    """
    containers = sys.modules.get("optimizations.trees.containers")  # not imported where nothing was compiled
    return containers is None or bool(containers.settled())


def reset() -> None:
    """Forget all reports; free Encore's CUDA graphs, memory pools, kernels, and what placement keeps on the GPU.

    Compiled functions stay usable: they allocate and record again at their next calls.
    """
    from optimizations.calls.bound import release_bindings
    from optimizations.compiled_graph import release_feeds
    from optimizations.report import ENTRIES
    from optimizations.trees.graphed_function import release_recordings

    if steps := sys.modules.get("optimizations.capture.step.graphed_step"):
        steps.release_steps()
    if callables := sys.modules.get("optimizations.capture.callables.graph_callables"):
        callables.release_callables()
    ENTRIES.clear()
    release_bindings()
    release_recordings()
    release_feeds()
