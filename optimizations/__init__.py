"""Run programs of `torch.compile` with CUDA graphs that pay off, on the stock PyTorch wheel.

`torch.compile(model, backend="encore")` compiles a model; `graph_step` makes one CUDA graph of a whole training step,
`graph_callables` one each of modules and functions, in the order of a schedule.
`Options` documents what `options={...}` takes, `report` tells what was done with each graph, `explain` tells it
beforehand, `reset` forgets and frees.
Importing this package imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from optimizations.capture.callables.order import WrongOrder
from optimizations.options import CONCURRENCY, Concurrency, Options, WrongOption
from optimizations.report import GraphReport, recordings, report
from optimizations.report.steps import Refusal, StepChanged, StepRefused, StepReport
from optimizations.torch_internals import UnsupportedTorch

if TYPE_CHECKING:
    import torch

    from optimizations.capture.static_loader import StaticLoader
    from optimizations.report.explanation import PlacementExplanation

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


def explain(
    program: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> PlacementExplanation:
    """Return what placement would do with each FX graph of one call `program(*args, **kwargs)`, without compiling it.

    The call is really made, uncompiled graph by graph; on fake CUDA tensors (under a `FakeTensorMode`) that needs no
    GPU. `print` shows the result as text.

    Raises:
        UnsupportedTorch, WrongOption: as the backend does.
        TypeError: the program cannot be called.
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
    host_draws: Literal["refused", "unused"] = "refused",
    key: Callable[[], Hashable] | None = None,
    ignore: Sequence[str] = (),
    check_every: int | Literal["auto"] | None = "auto",
    on_change: Literal["raise", "warn"] = "raise",
    concurrency: Concurrency = CONCURRENCY,
) -> Any:
    """Return `step`, replayed as one CUDA graph where that is possible; usable as a decorator, of methods too.

    A recorded step repeats the GPU work of the call it was recorded from. Before each replay Encore compares the
    arguments, settings, and the modules, optimizers and plain numbers that the step reaches. Anything else that decides
    which operators run, or with which numbers, is yours to name with `key`. From time to time a call runs uncaptured
    and its operators are compared with the recording's; a difference raises `StepChanged` with the line.

    `step(batch)` runs forward, loss, backward and optimizer, and returns losses and metrics as tensors. The first
    calls run as they are. Then two calls of a signature (structure of the arguments; shape, strides and dtype of their
    tensors; numbers and strings) are observed, and if a graph could repeat them the next is recorded. Results are
    copied out and stay valid. What a graph cannot repeat is refused with a reason and a line, as a warning and in
    `.report()`, and runs as it is. `.reset()` frees the graphs and begins again, `.close()` frees them for good.
    `docs/capture.md` tells what works.

    Args:
        step: a function or method, its modules and optimizers reached through its variables and attributes.
        warm_up: calls before the first recording, at least 3; DistributedDataParallel gets 11.
        limit: recordings alive at one time, at least 1; calls of further signatures run as they are.
        memory_budget_bytes: most memory that the graphs' pool may hold; None for what is free.
        learning_rate: "auto" hands a learning rate that changes to the graph as a float32 tensor, where the optimizer
            takes one (`capturable=True`, `fused=True`); "number" never does, and such a step is not recorded.
        on_refusal: "run" runs a refused step as it is, "raise" raises `StepRefused` before it does anything.
        host_draws: "refused" refuses a step that draws random numbers on the host (PyTorch's CPU generator, `random`,
            NumPy). "unused" is your word that these numbers decide nothing, as those of LayerDrop at rate 0: launches
            do not draw them. A step is still refused if they reach the GPU or its results.
        key: a function without arguments; each value that it returns has a recording of its own.
        ignore: names of values that change between calls and decide nothing, as a refusal writes them.
        check_every: "auto" audits a few early calls, and later 1 % of the time; N audits every N-th call, None none.
        on_change: "raise" raises `StepChanged` where an audit finds a difference, "warn" warns and records again.
        concurrency: "auto" runs kernels that do not depend on each other at the same time, where that is measured to
            make the graph 3 % faster; "off" one after the other. `docs/concurrency.md` tells more.

    Raises:
        TypeError: the step is not a function, a number is not a whole one, or `key` returns what has no hash.
        ValueError: an option is out of range; the message says what is allowed.
        StepRefused: in a call, with `on_refusal="raise"`.
        StepChanged: in an audited call, which has done its work.
    """
    from optimizations.capture.step.graphed_step import graph_step as make

    return make(
        step,
        warm_up=warm_up,
        limit=limit,
        memory_budget_bytes=memory_budget_bytes,
        learning_rate=learning_rate,
        on_refusal=on_refusal,
        host_draws=host_draws,
        key=key,
        ignore=ignore,
        check_every=check_every,
        on_change=on_change,
        concurrency=concurrency,
    )


def static_loader(loader: Iterable[Any], device: torch.device | str | int | None = None) -> StaticLoader:
    """Return an iterator over the batches of `loader` that copies each to fixed addresses on a GPU, ahead of its use.

    A step that fetches its own batches can then be recorded:

        batches = encore.static_loader(DataLoader(dataset, batch_size=32, pin_memory=True))

        @encore.graph_step
        def step():
            inputs, labels = next(batches)
            ...

    `iter(batches)` begins an epoch, and `next` raises StopIteration at its end. Inside of a step each batch of a call
    has buffers of its own. Elsewhere a batch is overwritten by the next one: clone what you keep.

    Args:
        loader: yields tensors of any device, numbers and strings, in tuples, lists, dicts and nests of them. Batches of
            equal structure, shapes and dtypes share their buffers; each other kind gets its own, and a graph.
        device: the GPU; the current one where it is None.

    Raises:
        TypeError: `loader` cannot be iterated over.
        ValueError: `device` is no CUDA device.
    """
    from optimizations.capture.static_loader import static_loader as make

    return make(loader, device)


def graph_callables(
    callables: Any,
    sample_args: Sequence[Any] | None = None,
    *,
    order: Sequence[int] | None = None,
    sample_kwargs: Sequence[Mapping[str, Any] | list[Mapping[str, Any]]] | None = None,
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
        sample_kwargs: keyword arguments of each, where it is called with such. A list of dicts is for its micro-batches
            in turn, the last for all that follow: each value of a flag has graphs of its own.
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
    from optimizations.report import LEDGER
    from optimizations.trees.maker import release_recordings

    if steps := sys.modules.get("optimizations.capture.step.graphed_step"):
        steps.release_steps()
    if callables := sys.modules.get("optimizations.capture.callables.graph_callables"):
        callables.release_callables()
    LEDGER.clear()
    release_bindings()
    release_recordings()
    release_feeds()
