"""What Inductor made of a graph: how many pieces become CUDA graphs, or why none does.

It is seen in `CompiledFxGraph.post_compile`, the one place that every graph passes, compiled or loaded from a cache.
Like the making of CUDA graphs (see `replay.hook`), it has to be watched at both ends: around `compile_fx`, and around
each `inner_compile`, because a backward is compiled when it first runs. Dynamo holds its compile lock around either, so
nothing else is compiled while the method is replaced.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from optimizations import torch_internals
from optimizations.report import CompiledGraph, Direction

Note = Callable[[CompiledGraph], None]

_watching: ContextVar[bool] = ContextVar("encore_watching", default=False)


@contextlib.contextmanager
def watched(note: Note) -> Iterator[None]:
    """Gives `note` the record of each graph that passes during the block. A block within a block does nothing."""
    if _watching.get():
        yield
        return
    owner, attribute = torch_internals.place("post_compile")
    stock = getattr(owner, attribute)

    @functools.wraps(stock)
    def post_compile(graph: Any, *arguments: Any, **keywords: Any) -> Any:
        result = stock(graph, *arguments, **keywords)
        note(_outcome(graph))
        return result

    token = _watching.set(True)
    try:
        with torch_internals.replaced("post_compile", post_compile):
            yield
    finally:
        _watching.reset(token)


def watching(inner_compile: Callable[..., Any], note: Note) -> Callable[..., Any]:
    """`inner_compile` with `watched(note)` around each call."""

    @functools.wraps(inner_compile)
    def compile_watched(*arguments: Any, **settings: Any) -> Any:
        with watched(note):
            return inner_compile(*arguments, **settings)

    return compile_watched


def _outcome(graph: Any) -> CompiledGraph:
    direction: Direction = "forward"
    if graph.fx_kwargs.get("is_backward"):
        direction = "backward"
    elif graph.fx_kwargs.get("is_inference"):
        direction = "inference"
    reasons: list[str] = []
    if graph.disabled_cudagraphs_reason:
        reasons.append(graph.disabled_cudagraphs_reason.strip())
    if graph.cudagraph_info is not None:
        reasons.extend(graph.cudagraph_info.cudagraph_fail_reasons)
    partitions = 0
    if not reasons and "cuda" in graph.device_types:
        partitioned = torch_internals.inductor_config.graph_partition
        partitions = len(graph.partition_maps or ()) if partitioned else 1
    return CompiledGraph(direction, partitions, tuple(dict.fromkeys(reasons)))
