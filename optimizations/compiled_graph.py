"""Compile a graph on a supported PyTorch: placement, then Inductor with Encore's CUDA graphs."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals
from optimizations.calls.binding import Binding, bind
from optimizations.calls.bound import bound, release_bindings
from optimizations.calls.shortcut import finishing
from optimizations.calls.turns import RUNNING, backwards_here, inside_a_function
from optimizations.options import Options
from optimizations.placement import Feeds, Placement, place, untouched
from optimizations.report import ENTRIES, BindingReport, CompiledGraph, Entry
from optimizations.stack_trace import one_line
from optimizations.torch_internals.cpu_results import corrected, marked
from optimizations.torch_internals.left_out import left_out_with_its_operator, with_operators_left_out
from optimizations.torch_internals.outcome import watched
from optimizations.torch_internals.saved_conjugates import saving_without_flags
from optimizations.torch_internals.wrappers import taking_a_list
from optimizations.trees import hook
from optimizations.trees.containers import manager_of
from optimizations.weak_registry import WeakRegistry

_FEEDS: WeakRegistry[Feeds] = WeakRegistry()
"""Run-time state of all graphs compiled in this process, for `reset`."""

_CHANGED = torch_internals.Replacing(
    {
        "should_partition": left_out_with_its_operator,
        "move_constructors_to_gpu": corrected,
        "partition_fn": saving_without_flags,
    }
)
"""Functions of Inductor that Encore changes while it compiles."""


def compile_graph(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], settings: Options, inductor: dict[str, Any]
) -> Callable[..., Any]:
    """Compile one FX graph of Dynamo: placement, then Inductor with these settings and Encore's CUDA graphs."""
    inductor = marked(with_operators_left_out(inductor))
    placement = _placed(graph_module, example_inputs, settings)
    try:
        return _compiled(graph_module, example_inputs, placement, settings, inductor)
    except torch_internals.RestartAnalysis:  # Dynamo traces the frame again
        raise
    except Exception as error:
        if placement.graph_module is graph_module:
            raise
        reason = f"Inductor failed on the graph after placement: {one_line(error)}"
        placement = untouched(graph_module, reason, placement.report)
    # Inductor may fail on what no program writes, such as the place of the largest number of a linspace on the GPU.
    compiled = _compiled(graph_module, example_inputs, placement, settings, inductor)
    warnings.warn(f"Encore leaves a graph as it is; {placement.report.untouched}", stacklevel=2)
    return compiled


def _compiled(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    placement: Placement,
    settings: Options,
    inductor: dict[str, Any],
) -> Callable[..., Any]:
    """Return what Dynamo calls in place of the graph, which is compiled as it was placed."""
    inputs = placement.example_inputs(example_inputs)
    entry = Entry(placement.report)
    maker = _maker(settings, inductor, entry)

    def note(record: CompiledGraph, graph: Any) -> None:
        entry.compiled.append(record)
        if maker is not None:
            maker.compiled(graph, graphed=record.partitions > 0)

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        captured = contextlib.nullcontext() if maker is None else hook.captured_by(maker)
        with watched(note), captured:
            yield

    @functools.wraps(torch_internals.compile_fx_inner)
    def compile_inner(*arguments: Any, **settings: Any) -> Any:
        with noted(), _CHANGED:  # a backward is compiled when it first runs, in a thread of its own
            compiled = torch_internals.compile_fx_inner(*arguments, **settings)
        no_operators = not isinstance(compiled, torch_internals.CompiledFxGraph)
        if maker is None or not settings.get("is_backward") or not no_operators:
            return compiled
        return _backward_without_operators(compiled, settings.get("boxed_forward_device_index"))

    shortcut = entry.note_shortcut if settings.lean else None
    forward_returns = None if maker is None else maker.forward_returns
    with noted(), finishing(shortcut, forward_returns), _CHANGED:
        compiled = torch_internals.compile_fx.compile_fx(
            placement.graph_module, inputs, inner_compile=compile_inner, config_patches=inductor
        )
    ENTRIES.append(entry)
    if placement.feeds is not None:
        original = graph_module.forward
        feeds = Feeds(placement.feeds, original if placement.feeds.apart else None)
        _FEEDS.add(feeds)
        compiled = _fed(compiled, feeds, original, own_operators=_calls_own_operators(graph_module))
    if not settings.lean:
        return compiled
    binding, entry.binding = _binding(graph_module)
    return compiled if binding is None else bound(compiled, binding)


def _backward_without_operators(compiled: Callable[..., Any], device_index: Any) -> Callable[..., Any]:
    """Return a backward that tells the manager of its forward that it runs.

    Inductor tells stock's manager of each backward that it compiles, but it leaves one that only passes gradients on
    as it is. Its forward would count as pending, and no call would begin an iteration: each would be recorded again.
    """

    @functools.wraps(compiled)
    def run(inputs: Any) -> Any:
        index = getattr(device_index, "value", None)  # None: its forward has no graph
        if index is not None and (manager := manager_of(index)) is not None:
            manager.set_to_running_backward()
        return compiled(inputs)

    return run


def reset() -> None:
    """Free what compiled functions hold. Reports are kept.

    PyTorch ends stock's graphs of the calling thread. Encore's are ended after the calls that other threads are in.
    """
    release_bindings()
    maker = sys.modules.get("optimizations.trees.graphed_function")  # not imported where no graph was ever made
    if maker is not None:
        maker.release_recordings()


def release_feeds() -> None:
    """Give back the device memory of all hoisted values and staging buffers; the next calls allocate it again."""
    for feeds in _FEEDS.alive():
        feeds.release()


def _placed(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], settings: Options) -> Placement:
    """Return the graph after placement, or unchanged: placement must not make a program fail that stock compiles."""
    try:
        held_bytes = sum(feeds.device_bytes for feeds in _FEEDS.alive())
        return place(graph_module, example_inputs, settings, held_bytes=held_bytes)
    except Exception as error:
        reason = f"placement failed: {type(error).__name__}: {error}"
        warnings.warn(f"Encore leaves a graph as it is; {reason}. This is a defect of Encore.", stacklevel=2)
        return untouched(graph_module, reason)


def _binding(graph_module: torch.fx.GraphModule) -> tuple[Binding | None, BindingReport]:
    """Return what Dynamo's call does not pass, or nothing if a defect of Encore prevents it."""
    try:
        return bind(graph_module)
    except Exception as error:
        reason = f"binding failed: {type(error).__name__}: {error}"
        warnings.warn(f"Dynamo loads all parameters; {reason}. This is a defect of Encore.", stacklevel=2)
        return None, BindingReport(0, reason)


def _maker(settings: Options, inductor: Mapping[str, Any], entry: Entry) -> Any:
    """Return the maker of the CUDA graphs; None for stock."""
    with torch_internals.inductor_config.patch(inductor):
        triton = torch_internals.inductor_config.triton
        stock = not triton.cudagraphs or not triton.cudagraph_trees
    if settings.indirection == "off" or stock:
        return None
    from optimizations.graph.prelude_check import build_early
    from optimizations.trees.graphed_function import EncoreMaker

    if torch.cuda.is_initialized():
        build_early()
    return EncoreMaker(settings, entry.functions.append)


def _calls_own_operators(graph_module: torch.fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo calls operators that PyTorch does not define, and that may run a backward."""
    graphs = [one.graph for one in graph_module.modules() if isinstance(one, torch.fx.GraphModule)]
    modules = {str(getattr(node.target, "__module__", None)) for graph in graphs for node in graph.nodes}
    pure = {f"torch._ops.{namespace}" for namespace in torch_internals.PURE_OPERATORS}
    return any(name.startswith("torch._ops.") for name in modules - pure)


def _fed(
    compiled: Callable[..., Any], feeds: Feeds, original: Callable[..., Any], *, own_operators: bool
) -> Callable[..., Any]:
    """Return the function Dynamo calls in place of the graph. A plain function: Dynamo wraps it and calls it by that.

    `original` is the graph before placement. `own_operators`: see Note [Backwards inside of functions] in
    `calls.turns`.
    """

    def as_it_was() -> bool:
        """Return whether to run the original graph.

        Notes [Captures of the program's own] in `placement.feeds` and [Order of locks] in `calls.turns`.
        """
        return not hook.at_rest_now and (feeds.inside_a_capture() or (bool(RUNNING) and inside_a_function()))

    if not feeds.is_plain:
        compiled = torch_internals.innermost_fn(compiled)  # Dynamo keeps out of `run` already
        if own_operators:
            compiled = functools.partial(backwards_here, compiled)

        def run(*arguments: Any) -> Any:
            if as_it_was():
                return original(*arguments)
            return feeds.call(compiled, arguments)

        return run
    compiled_of_list = taking_a_list(compiled)
    if own_operators:
        compiled_of_list = functools.partial(backwards_here, compiled_of_list)

    def run_plainly(*arguments: Any) -> Any:
        if as_it_was():
            return original(*arguments)
        with feeds.turn:  # Note [Threads] in `placement.feeds`
            return compiled_of_list([*feeds.bind(arguments)])

    return run_plainly
