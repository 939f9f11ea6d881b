"""Encore: CUDA graphs that pay off under `torch.compile`, on the stock PyTorch wheel.

`torch.compile(model, backend="encore")` compiles a model; `graph_step` makes one CUDA graph of a whole training step.
`Options` documents what `options={...}` takes, `report` tells what was done with each graph, `explain` tells it
beforehand, `reset` forgets and frees.
Importing this package imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from optimizations.options import Options, WrongOption
from optimizations.report import GraphReport, report
from optimizations.report.steps import Refusal, StepReport
from optimizations.torch_internals import UnsupportedTorch

if TYPE_CHECKING:
    from optimizations.report.explanation import Explanation

__all__ = [
    "GraphReport",
    "Options",
    "Refusal",
    "StepReport",
    "UnsupportedTorch",
    "WrongOption",
    "explain",
    "graph_step",
    "report",
    "reset",
]


def explain(
    program: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Explanation:
    """What placement would do with each FX graph of one call `program(*args, **kwargs)`, without compiling it.

    The call is really made, uncompiled graph by graph; on fake CUDA tensors (under a `FakeTensorMode`) that needs no
    GPU. `print` shows the result as text.

    Raises:
        UnsupportedTorch, WrongOption: as the backend does.
        Exception: whatever the program raises itself.
    """
    from optimizations.report.explanation import explain as explain_call

    return explain_call(program, args, kwargs, options)


def graph_step(
    step: Callable[..., Any] | None = None,
    *,
    warm_up: int = 3,
    limit: int = 8,
    memory_budget_bytes: int | None = None,
    learning_rate: Literal["auto", "number"] = "auto",
    on_refusal: Literal["run", "raise"] = "run",
) -> Any:
    """`step`, replayed as one CUDA graph where that is possible; usable as a decorator, of methods too.

    `step(batch)` runs forward, loss, backward and optimizer, and returns losses and metrics as tensors. The first
    calls run as they are. Then two calls of a signature (structure of the arguments; shape, strides and dtype of their
    tensors; numbers and strings) are observed, and if a graph could repeat them the next is recorded. Results are
    copied out and stay valid. What a graph cannot repeat is refused with a reason and a line, as a warning and in
    `.report()`, and runs as it is. `.close()` frees the graphs. `docs/capture.md` tells what works.

    Args:
        step: a function or method, its modules and optimizers reached through its variables and attributes.
        warm_up: calls before the first recording, at least 3; DistributedDataParallel gets 11.
        limit: recordings alive at one time; calls of further signatures run as they are.
        memory_budget_bytes: most memory that the graphs' pool may hold; None for what is free.
        learning_rate: "auto" hands a learning rate that changes to the graph as a float32 tensor, where the optimizer
            takes one (`capturable=True`, `fused=True`); "number" never does, and such a step is not recorded.
        on_refusal: "run" runs a refused step as it is, "raise" raises `StepRefused` before it does anything.

    Raises:
        TypeError, ValueError: the step is no function, or an option is out of range; the message says what is allowed.
    """
    from optimizations.capture.step.graphed_step import graph_step as make

    return make(
        step,
        warm_up=warm_up,
        limit=limit,
        memory_budget_bytes=memory_budget_bytes,
        learning_rate=learning_rate,
        on_refusal=on_refusal,
    )


def reset() -> None:
    """Forget all reports, and free Encore's CUDA graphs, their memory pools, its kernels, and what placement keeps on
    the GPU.

    Compiled functions stay usable: they allocate and record anew at their next calls.
    """
    from optimizations.backend import release_feeds
    from optimizations.capture.trees.maker import release_recordings
    from optimizations.replay.bound import release_bindings
    from optimizations.report import LEDGER

    if steps := sys.modules.get("optimizations.capture.step.graphed_step"):
        steps.release_steps()
    LEDGER.clear()
    release_bindings()
    release_recordings()
    release_feeds()
