"""Record how Inductor compiled a graph: how many pieces become CUDA graphs, and why the rest does not.

This is the only observer of it; the backend's report, the suite's measurements and `encore explain` read what it notes.

* `CompiledFxGraph.post_compile` is the one place that every graph passes, compiled or loaded from a cache. It tells how
  many pieces will be captured, or why none is.
* `Scheduler.graph_partition` splits a graph, and gives a reason for each operation that it leaves out. A graph
  from a warm cache was split earlier, maybe in another process: such reasons are then missing.
* The lines of the program that a split graph comes from are kept (`generated_modules`).
* Mutated inputs are found when a graph is called, and only the `cudagraphs` log hears of them (`mutations_noted`).

Like the making of CUDA graphs (see `trees.hook`), compilation has to be watched at both ends: around
`compile_fx`, and around each `inner_compile`, because a backward is compiled when it first runs. Several threads may
compile at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from optimizations import torch_internals
from optimizations.report import CompiledGraph, Direction, LeftOut
from optimizations.stack_trace import Frame, reason_and_frame, user_frame
from optimizations.torch_internals import Replacing
from optimizations.torch_internals.generated_modules import with_lines_of_partitions

MUTATED = "skipping cudagraphs due to mutated inputs"
NO_CUDA_WORK = "nothing in the graph runs on a CUDA device"
FORWARD_NOT_CAPTURED = "backward of a graph that was not captured"
SWITCHED_OFF = "CUDA graphs are switched off"

Note = Callable[[CompiledGraph, Any], None]
"""Called with the record of a graph, and with its `CompiledFxGraph`."""

_noting: list[tuple[int | None, Note]] = []
"""Observers, each with its thread, or None for all threads."""
_of_this_thread = threading.local()


@contextlib.contextmanager
def watched(note: Note, *, every_thread: bool = False) -> Iterator[None]:
    """Give `note` the record of each graph that passes during the block, in this thread or in any.

    Of blocks within blocks of the same thread the innermost gets them; blocks for every thread all do.
    """
    if not every_thread:
        _left_out_so_far()  # of a compilation that failed
    one = None if every_thread else threading.get_ident(), note
    with _OBSERVER:
        _noting.append(one)
        try:
            yield
        finally:
            _noting.remove(one)


@contextlib.contextmanager
def mutations_noted(note: Callable[[LeftOut], None]) -> Iterator[None]:
    """Give `note` each graph that is not captured because of mutated inputs, when it is first called."""
    logger = torch_internals.cudagraph_utils.cudagraphs_log

    def seen(record: logging.LogRecord) -> bool:
        if (message := record.getMessage()).startswith(MUTATED):  # other records have the other messages
            note(in_words(message))
        return True

    logger.addFilter(seen)
    try:
        yield
    finally:
        logger.removeFilter(seen)


def _observing_post_compile(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def post_compile(graph: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> Any:
        wanted = bool(graph_kwargs["cudagraphs"])
        result = stock(graph, example_inputs, constants, graph_kwargs)
        outcome = _outcome(graph, wanted, bool(graph_kwargs["cudagraphs"]), _left_out_so_far())
        noting, thread = list(_noting), threading.get_ident()
        innermost = [note for of, note in noting if of == thread][-1:]
        for note in [*(note for of, note in noting if of is None), *innermost]:
            note(outcome, graph)
        return result

    return post_compile


def _observing_graph_partition(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def graph_partition(scheduler: Any) -> Any:
        partitions, signatures = stock(scheduler)
        found = _of_this_thread.__dict__.setdefault("left_out", [])
        for partition, signature in zip(partitions, signatures, strict=True):
            if signature.skip_cudagraph:
                found.extend(_left_out(scheduler, partition))
        return partitions, signatures

    return graph_partition


_OBSERVER = Replacing(
    {
        "post_compile": _observing_post_compile,
        "graph_partition": _observing_graph_partition,
        "define_partition": with_lines_of_partitions,
    }
)


def _left_out_so_far() -> tuple[LeftOut, ...]:
    """Return what partitions of this thread left out since the last call."""
    found = Counter(_of_this_thread.__dict__.pop("left_out", ()))
    return tuple(LeftOut(reason, line, count) for (reason, line), count in found.items())


def _left_out(scheduler: Any, partition: Any) -> Iterator[tuple[str, str | None]]:
    """Yield the operations of one partition that will run outside of CUDA graphs."""
    for group in partition:
        for node in group.get_nodes():
            idle = isinstance(node, torch_internals.NopKernelSchedulerNode)
            takes_out = isinstance(node.node, torch_internals.MultiOutput)
            if not idle and not takes_out and (reason := scheduler.should_partition(node)):
                frame = scheduled_frame(node)
                yield reason, None if frame is None else str(frame)


def scheduled_frame(node: Any) -> Frame | None:
    """Return the user's line that a node of Inductor's schedule comes from."""
    ir_nodes = [part.node for part in node.get_nodes() if part.node is not None]
    origins = [origin for each in ir_nodes for origin in (each.get_origin_node(), *each.get_origins()) if origin]
    frames = (user_frame(origin.meta.get("stack_trace")) for origin in origins)
    return next((frame for frame in frames if frame is not None), None)


def in_words(message: str) -> LeftOut:
    """Return one of Inductor's messages as a record."""
    reason, frame = reason_and_frame(message)
    return LeftOut(reason, None if frame is None else str(frame))


def _outcome(graph: Any, wanted: bool, enabled: bool, left_out: tuple[LeftOut, ...]) -> CompiledGraph:
    """Return the outcome. `wanted`, `enabled`: were there to be CUDA graphs before and after `post_compile`?"""
    direction: Direction = "forward"
    if graph.fx_kwargs.get("is_backward"):
        direction = "backward"
    elif graph.fx_kwargs.get("is_inference"):
        direction = "inference"
    if enabled:
        # None: the graph was not partitioned, and is captured whole.
        return CompiledGraph(direction, 1 if graph.partition_maps is None else len(graph.partition_maps), (), left_out)
    reasons: tuple[str, ...] = ()
    if "cuda" not in graph.device_types:
        reasons = (NO_CUDA_WORK,)
    elif graph.disabled_cudagraphs_reason:
        reasons = (graph.disabled_cudagraphs_reason,)
    elif not torch_internals.inductor_config.triton.cudagraphs:
        reasons, left_out = (SWITCHED_OFF,), ()
    elif not wanted:
        reasons = (FORWARD_NOT_CAPTURED,)
    elif graph.cudagraph_info is not None:
        reasons = tuple(graph.cudagraph_info.cudagraph_fail_reasons)
    return CompiledGraph(direction, 0, tuple(map(in_words, dict.fromkeys(reasons))), left_out)
