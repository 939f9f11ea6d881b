"""Run programs of `torch.compile` with CUDA graphs that pay off, on the stock PyTorch wheel.

`torch.compile(model, backend="encore")` compiles a model; `graph_step` makes one CUDA graph of a whole training step,
`graph_callables` one each of modules and functions, in the order of a schedule.
`Options` documents what `options={...}` takes, `report` tells what was done with each graph, `explain` tells it
beforehand, `reset` forgets and frees.
Importing this package imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from optimizations.capture.callables.order import WrongOrder
from optimizations.options import CONCURRENCY, Concurrency, Options, WrongOption
from optimizations.report import GraphReport, recordings, report
from optimizations.report.steps import Refusal, StepChanged, StepRefused, StepReport
from optimizations.torch_internals import UnsupportedTorch

if TYPE_CHECKING:
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
    "graph_step": "optimizations.capture.step.graphed_step",
    "static_loader": "optimizations.capture.static_loader",
}
"""Functions whose modules import torch."""


def __getattr__(name: str) -> Any:
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module 'optimizations' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LOADED_WHEN_USED[name]), name)
    return value


def graph_callables(
    callables: Any,
    sample_args: Sequence[Any] | None = None,
    *,
    order: Sequence[int] | None = None,
    sample_kwargs: Sequence[Mapping[str, Any]] | None = None,
    warm_up: int = 3,
    outputs: Literal["static", "copied"] = "static",
    share_io: bool = False,
    host_draws: Literal["refused", "unused"] = "refused",
    concurrency: Concurrency = CONCURRENCY,
) -> Any:
    """Return modules and functions, each with forward and backward CUDA graphs for the micro-batches of a schedule.

    Returns a sequence of the callables: modules as they are, which run their graphs from now on wherever they stand in
    a model, and functions as new ones. A call runs as it is where no graph fits its arguments, its mode or what it
    uses, or where the backwards of earlier calls still need the graphs' memory. So do calls without gradients, such as
    validation. `.report()` lists the graphs, `.end_iteration()` ends the first iteration of a program without an
    optimizer, `.restart()` gives up backwards that did not come, `.close()` frees the graphs.

    Args:
        callables: a module or function, or a list of them; a list or `ModuleList` within is a chunk of layers.
        sample_args: a tuple of arguments for each, nests of tensors on the GPU; or one sequence of tensors for all.
            Default: samples and order are found in the first iteration, which runs as it is and ends when an optimizer
            of PyTorch's has made its step.
        order: forwards as 1, 2, ..., their backwards as -1, -2, ..., micro-batch after micro-batch, as
            `[1, 1, 2, -2, -1, 2, -2, -1]`; numbers stand for the entries of `callables`. It tells how many
            micro-batches are alive at one time. Default: one, with a backward unless under `torch.no_grad()`.
        sample_kwargs: keyword arguments of each, where it is called with such.
        warm_up: runs of each before its capture, at least 1. What they change (buffers, the random state) is put back.
        outputs: "static" returns results where the graph writes them, and gives live ones memory of their own before
            the next launch; "copied" copies all of them.
        share_io: a callable reads the results of the one before where they lie, and copies none.
        host_draws: as of `graph_step`.
        concurrency: as of `graph_step`, for each of the graphs.

    Raises:
        WrongOrder: no training loop can follow `order`.
        ValueError, TypeError: an argument is wrong; the message says what is allowed.
        StepRefused: a graph could not repeat what a callable does; nothing was recorded. Without samples it is raised
            by the first call after the first iteration, and later calls run as they are.
    """
    from optimizations.capture.callables.graph_callables import graph_callables as make

    return make(
        callables,
        sample_args,
        order=order,
        sample_kwargs=sample_kwargs,
        warm_up=warm_up,
        outputs=outputs,
        share_io=share_io,
        host_draws=host_draws,
        concurrency=concurrency,
    )


def settled() -> bool:
    """Return whether every recorded graph is in its final state: no plan is pending, and no race runs.

    A graph that is not called any more never settles.
    """
    containers = sys.modules.get("optimizations.trees.containers")  # not imported where nothing was compiled
    functions = sys.modules.get("optimizations.trees.graphed_function")
    return (containers is None or bool(containers.settled())) and (functions is None or not functions.races_run())


def reset() -> None:
    """Forget all reports; free Encore's CUDA graphs, memory pools, kernels, and what placement keeps on the GPU.

    Compiled functions stay usable: they allocate and record again at their next calls.
    """
    from optimizations.calls.bound import release_bindings
    from optimizations.compiled_graph import release_feeds
    from optimizations.report import ENTRIES
    from optimizations.trees.maker import release_recordings

    if steps := sys.modules.get("optimizations.capture.step.graphed_step"):
        steps.release_steps()
    if callables := sys.modules.get("optimizations.capture.callables.graph_callables"):
        callables.release_callables()
    ENTRIES.clear()
    release_bindings()
    release_recordings()
    release_feeds()
