"""Send what Inductor would make CUDA graphs of to another maker, for chosen compilations only.

Inductor turns a compiled function into a CUDA-graphed one in `post_compile`, at the end of every compilation and of
every load from its caches, by calling `torch._inductor.compile_fx.cudagraphify`. While at least one compilation asks
for another maker, that name is a dispatcher: in a thread that has asked it calls the maker, in all others stock. Once
no compilation asks, the name is stock's again. The same goes for `cudagraph_trees.get_manager`, which `post_compile`
asks for the manager to tell when a backward runs that is not captured itself. At the end of `post_compile` the maker
also receives the compiled function, captured or not (`maybe_realign_inputs` is the last that it calls, in every case).

Note [Both ends of a compilation]. `compile_fx` covers forward and inference graphs, and everything that comes from
AOTAutograd's cache (there forward and backward pass `post_compile` together, and `inner_compile` is not called). But a
backward is compiled when it first runs, long after `compile_fx` returned and in a thread of the autograd engine. So the
maker must be asked for around both, and `captured_by` stands around `compile_fx` and in its `inner_compile`.

Note [Compiled modules inside of a step]. A graph of CUDAGraph Trees cannot be recorded or replayed inside of another
capture. Its manager has a way to run a function without a graph, for functions that mutate their inputs. `at_rest`
takes the same way while a step is warmed up and captured.
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
"""Entries of `torch_internals.NAMES` that are dispatched; `maker.EncoreMaker` has a method for each."""

OBSERVED = "maybe_realign_inputs"
"""The entry that is called as in stock, after which the maker's method `compiled` is called."""


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


def _observed(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def realign(graphed: Any, compiled_graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(graphed, compiled_graph, *args, **kwargs)
        maker = _asked.get()
        if maker is not None:
            maker.compiled(compiled_graph, graphed=bool(graphed))
        return result

    return realign


_DISPATCH = Replacing(
    {OBSERVED: _observed} | {name: functools.partial(_dispatched, name) for name in DISPATCHED},
)


at_rest_now = 0
"""How many blocks of `at_rest` are under way."""


def resting() -> bool:
    """Return whether graphs of compiled modules are to run as the functions they were made of."""
    return at_rest_now > 0


@contextlib.contextmanager
def at_rest() -> Iterator[None]:
    """Run compiled modules without CUDA graphs of their own inside the block, in all threads."""
    global at_rest_now
    manager: Any = torch_internals.cudagraph_trees.CUDAGraphTreeManager

    # `_run` is looked up in each call. `run` is not to be replaced: functions compiled inside the block keep it.
    def run(self: Any, new_inputs: list[Any], function_id: Any) -> Any:
        return self.ids_to_funcs[function_id].model(new_inputs)

    at_rest_now += 1
    try:
        with replaced_attribute(manager, "_run", run):
            yield
    finally:
        at_rest_now -= 1
