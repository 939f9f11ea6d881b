"""Replace the maker of CUDA graphs for chosen compilations only.

Inductor turns a compiled function into a CUDA-graphed one in `post_compile`, at the end of every compilation and of
every load from its caches, by calling `torch._inductor.compile_fx.cudagraphify`. While at least one thread is inside
`captured_by`, that name is a dispatcher: it calls the thread's own maker inside the block, and stock elsewhere. After
the last block, the name is stock's again. The same holds for `cudagraph_trees.get_manager`, which `post_compile` calls
to notify the manager when a backward without a graph runs.

Note [Both ends of a compilation]. `compile_fx` covers forward and inference graphs, and everything from AOTAutograd's
cache (there forward and backward pass `post_compile` together, without a call of `inner_compile`). But a backward is
compiled when it first runs, long after `compile_fx` returned and in a thread of the autograd engine. So `captured_by`
wraps both `compile_fx` and its `inner_compile`.

Note [Compiled modules inside of a step]. A graph of CUDAGraph Trees cannot be recorded or replayed inside of another
capture. Its manager can run a function without a graph, for functions that mutate their inputs. `at_rest` makes all
functions run this way while a step is warmed up and captured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from optimizations import torch_internals
from optimizations.torch_internals import Replacing, replaced_attribute

DISPATCHED = ("cudagraphify", "get_manager")
"""Entries of `torch_internals.NAMES` that are dispatched; `graphed_function.EncoreMaker` has a method for each."""

_asked: ContextVar[Any] = ContextVar("encore_maker", default=None)


@contextlib.contextmanager
def captured_by(maker: Any) -> Iterator[None]:
    """Let `maker` make the CUDA graphs of what this thread compiles inside the block. Blocks may nest."""
    with _DISPATCH:
        token = _asked.set(maker)
        try:
            yield
        finally:
            _asked.reset(token)


def _dispatched(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        maker = _asked.get()
        return (stock if maker is None else getattr(maker, name))(*args, **kwargs)

    return dispatch


_DISPATCH = Replacing({name: functools.partial(_dispatched, name) for name in DISPATCHED})


at_rest_now = 0
"""The number of active blocks of `at_rest`: in them compiled modules run without CUDA graphs of their own."""


@contextlib.contextmanager
def at_rest() -> Iterator[None]:
    """Run compiled modules without CUDA graphs of their own inside the block, in all threads."""
    global at_rest_now
    manager: Any = torch_internals.cudagraph_trees.CUDAGraphTreeManager

    # `_run` is looked up in each call. `run` must not be replaced: functions compiled inside the block would keep it.
    def run(self: Any, new_inputs: list[Any], function_id: Any) -> Any:
        return self.ids_to_funcs[function_id].model(new_inputs)

    at_rest_now += 1
    try:
        with replaced_attribute(manager, "_run", run):
            yield
    finally:
        at_rest_now -= 1
