"""What Inductor made of a graph: how many pieces become CUDA graphs, or why none does.

It is seen in `CompiledFxGraph.post_compile`, the one place that every graph passes, compiled or loaded from a cache.
Like the making of CUDA graphs (see `replay.hook`), it has to be watched at both ends: around `compile_fx`, and around
each `inner_compile`, because a backward is compiled when it first runs. Several threads may compile at once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from optimizations import torch_internals
from optimizations.report import CompiledGraph, Direction

Note = Callable[[CompiledGraph], None]

_noting: ContextVar[Note | None] = ContextVar("encore_noting", default=None)


@contextlib.contextmanager
def watched(note: Note) -> Iterator[None]:
    """Gives `note` the record of each graph that passes during the block, in this thread.

    A block within a block does nothing.
    """
    if _noting.get() is not None:
        yield
        return
    with _OBSERVER:
        token = _noting.set(note)
        try:
            yield
        finally:
            _noting.reset(token)


class _Observer:
    """The method in PyTorch's class: put in by the first block to begin, of any thread, taken out by the last to end.

    Threads that ended in another order than they began would otherwise put each other's method back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._stock: Any = None
        self._observing: Any = None

    def __enter__(self) -> None:
        owner, attribute = torch_internals.place("post_compile")
        with self._lock:
            if not self._blocks:
                self._stock = getattr(owner, attribute)
                self._observing = _observing(self._stock)
                setattr(owner, attribute, self._observing)
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        owner, attribute = torch_internals.place("post_compile")
        with self._lock:
            self._blocks -= 1
            # Someone may have put a wrapper of their own around the method; it then stays, and passes on.
            if not self._blocks and getattr(owner, attribute) is self._observing:
                setattr(owner, attribute, self._stock)


_OBSERVER = _Observer()


def _observing(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def post_compile(graph: Any, *arguments: Any, **keywords: Any) -> Any:
        result = stock(graph, *arguments, **keywords)
        note = _noting.get()
        if note is not None:
            note(_outcome(graph))
        return result

    return post_compile


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
