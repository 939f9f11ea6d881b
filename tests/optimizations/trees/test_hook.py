"""The hook reaches exactly the compilations that request it; Inductor really compiles, for the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.compiler import FakeMaker, other_program, program
from threads import in_threads

from optimizations import torch_internals
from optimizations.trees import hook
from optimizations.trees.hook import DISPATCHED, captured_by
from optimizations.trees.manager import EncoreManager

PATCHES = {"triton.cudagraphs": True, "graph_partition": False}


def backend_of(maker: FakeMaker) -> Callable[..., Any]:
    """A backend that requests `maker` as Encore's does."""

    def compile_inner(*arguments: Any, **settings: Any) -> Any:
        with captured_by(maker):
            return torch_internals.compile_fx_inner(*arguments, **settings)

    def backend(graph_module: Any, inputs: Any) -> Any:
        with captured_by(maker):
            return torch_internals.compile_fx.compile_fx(
                graph_module, inputs, inner_compile=compile_inner, config_patches=PATCHES
            )

    return backend


def stock_backend(graph_module: Any, inputs: Any) -> Any:
    return torch_internals.compile_fx.compile_fx(graph_module, inputs, config_patches=PATCHES)


def test_backward_is_compiled_by_its_forwards_backend(cuda_in_disguise: FakeMaker) -> None:
    """It is compiled when it first runs, long after `compile_fx` returned."""
    ours = FakeMaker()
    mine = torch.compile(program, backend=backend_of(ours))
    theirs = torch.compile(other_program, backend=stock_backend)
    x = torch.ones(8, 8, requires_grad=True)
    mine_out, theirs_out = mine(x), theirs(x)
    assert (ours.directions, cuda_in_disguise.directions) == (["forward"], ["forward"])
    mine_out.backward(torch.ones(8, 8))
    theirs_out.backward(torch.ones(8, 8))
    assert (ours.directions, cuda_in_disguise.directions) == (["forward", "backward"], ["forward", "backward"])
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((8, 8), 6.0))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_functions_from_caches_reach_the_maker(cuda_in_disguise: FakeMaker, needs_grad: bool) -> None:
    """Stock compiles first, so that Encore gets a cache hit; AOTAutograd's cache calls no `inner_compile`."""
    x = torch.ones(8, 8, requires_grad=needs_grad)

    def run(compiled: Callable[..., Any]) -> None:
        out = compiled(x)
        if needs_grad:
            out.backward(torch.ones(8, 8))

    run(torch.compile(program, backend=stock_backend))
    torch_internals.reset_dynamo()
    counters = torch_internals.dynamo_utils.counters
    counters.clear()
    ours = FakeMaker()
    before = list(cuda_in_disguise.directions)
    run(torch.compile(program, backend=backend_of(ours)))
    assert counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0
    assert ours.directions == (["forward", "backward"] if needs_grad else ["inference"])
    assert cuda_in_disguise.directions == before


def names_in_place() -> list[Any]:
    places = [torch_internals.holder_of(name) for name in DISPATCHED]
    return [getattr(owner, attribute) for owner, attribute in places]


def test_stock_names_are_restored_after_the_last_block() -> None:
    stock = names_in_place()
    first, second = FakeMaker(), FakeMaker()
    with captured_by(first):
        dispatchers = names_in_place()
        assert all(a is not b for a, b in zip(dispatchers, stock, strict=True))
        with captured_by(second):
            assert names_in_place() == dispatchers
            torch_internals.cudagraph_trees.get_manager(3)
        torch_internals.cudagraph_trees.get_manager(1)
    assert (first.managers, second.managers) == ([1], [3])
    assert names_in_place() == stock


def test_blocks_of_two_threads_may_end_in_any_order() -> None:
    stock = names_in_place()
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    makers = FakeMaker(), FakeMaker()

    def first() -> None:
        with captured_by(makers[0]):
            first_in.set()
            second_in.wait(10)
        first_out.set()

    def second() -> None:
        first_in.wait(10)
        with captured_by(makers[1]):
            second_in.set()
            first_out.wait(10)
            torch_internals.cudagraph_trees.get_manager(2)

    in_threads(first, second)
    assert (makers[0].managers, makers[1].managers) == ([], [2])
    assert names_in_place() == stock


def test_foreign_wrapper_of_the_dispatcher_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = torch_internals.cudagraph_trees
    stock_calls: list[int] = []
    monkeypatch.setattr(trees, "get_manager", lambda index, create=True: stock_calls.append(index))
    ours = FakeMaker()
    seen: list[int] = []
    with captured_by(ours):
        dispatcher = trees.get_manager

        def wrapper(index: int) -> Any:
            seen.append(index)
            return dispatcher(index)

        monkeypatch.setattr(trees, "get_manager", wrapper)
    assert trees.get_manager is wrapper
    trees.get_manager(4)
    assert (seen, stock_calls, ours.managers) == ([4], [4], [])


def test_compiled_modules_graphs_are_disabled_temporarily() -> None:
    manager = torch_internals.cudagraph_trees.CUDAGraphTreeManager
    stock, outer = manager._run, manager.run

    class Function:
        model = staticmethod(lambda inputs: [value + 1 for value in inputs])

    class Manager:
        ids_to_funcs = {7: Function}  # noqa: RUF012

    with hook.at_rest():
        assert hook.at_rest_now
        assert manager._run(Manager(), [1, 2], 7) == [2, 3]
        assert manager.run is outer  # functions that are compiled meanwhile keep a reference to it
        assert EncoreManager.run(Manager(), [1, 2], 7) == [2, 3]  # before any of its own bookkeeping
    assert manager._run is stock
    assert not hook.at_rest_now
