"""The hook reaches the compilations that ask for it, and no others: with Inductor compiling for real, on the CPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.compiler import FakeMaker, other_program, program

from optimizations import torch_internals
from optimizations.trees.hook import DISPATCHED, OBSERVED, asking, captured_by
from optimizations.trees.maker import EncoreMaker

PATCHES = {"triton.cudagraphs": True, "graph_partition": False}


def backend_of(maker: FakeMaker) -> Callable[..., Any]:
    """A backend that asks for `maker` as Encore's does."""

    def backend(graph_module: Any, inputs: Any) -> Any:
        with captured_by(maker):
            return torch_internals.compile_fx.compile_fx(
                graph_module,
                inputs,
                inner_compile=asking(torch_internals.compile_fx_inner, maker),
                config_patches=PATCHES,
            )

    return backend


def stock_backend(graph_module: Any, inputs: Any) -> Any:
    return torch_internals.compile_fx.compile_fx(graph_module, inputs, config_patches=PATCHES)


def test_only_functions_that_ask_go_to_the_maker(cuda_in_disguise: FakeMaker) -> None:
    ours = FakeMaker()
    mine = torch.compile(program, backend=backend_of(ours))
    theirs = torch.compile(other_program, backend=stock_backend)
    for start in (1.0, 2.0):
        x = torch.full((8, 8), start)
        assert torch.allclose(mine(x), program(x))
        assert torch.allclose(theirs(x), other_program(x))
    assert (ours.directions, cuda_in_disguise.directions) == (["inference"], ["inference"])
    assert (ours.calls, cuda_in_disguise.calls) == (2, 2)


def test_a_backward_goes_where_its_forward_went(cuda_in_disguise: FakeMaker) -> None:
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
def test_what_comes_from_the_caches_goes_to_the_maker_as_well(cuda_in_disguise: FakeMaker, needs_grad: bool) -> None:
    """Compiled by stock first, so that ours is a hit; AOTAutograd's cache calls no `inner_compile`."""
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


def test_partitions_go_to_the_maker(cuda_in_disguise: FakeMaker) -> None:
    """The partitioned path of `post_compile`, which on a CPU has no partitions to find: handed two."""
    post_compile = sys.modules[torch_internals.CompiledFxGraph.__module__].cudagraph_partition_post_compile
    ours = FakeMaker()
    graph = _PartitionedGraph()
    with captured_by(ours):
        post_compile([], graph, _Box(), {}, None)
    assert [one["static_input_idxs"] for one in ours.made] == [(0,), (0,)]
    assert not cuda_in_disguise.made


class _Box:
    value = True


class _PartitionedGraph:
    """As much of a `CompiledFxGraph` with two partitions as is read."""

    class _Map:
        def __init__(self, number: int) -> None:
            self.id, self.input_index_mapping, self.output_index_mapping, self.constant_names = number, [0, 1], [0], []

    class _Info:
        placeholders = ("p0", "p1")
        stack_traces = (None,)
        cudagraph_fail_reasons = ()

    def __init__(self) -> None:
        self.cudagraph_info = self._Info()
        self.partition_maps = [self._Map(0), self._Map(1)]
        self.current_callable = print
        self.fx_kwargs = {"is_inference": True, "is_backward": False, "static_input_idxs": (0,)}
        self.mutated_input_idxs: set[int] = set()
        self.device_idxs = {0}
        self.kernel_free_cudagraph = False  # since PyTorch 2.14

    def recursively_apply_fns(self, functions: list[Callable[..., Any]]) -> None:
        for function in functions:
            function(print)


def names_in_place() -> list[Any]:
    places = [torch_internals.holder_of(name) for name in (OBSERVED, *DISPATCHED)]
    return [getattr(owner, attribute) for owner, attribute in places]


def test_names_are_stocks_again_when_nobody_asks() -> None:
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

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (makers[0].managers, makers[1].managers) == ([], [2])
    assert names_in_place() == stock


def test_a_wrapper_that_someone_puts_around_the_dispatcher_stays(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_maker_receives_functions_compiled_without_graphs(
    cuda_in_disguise: FakeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = iter((None, "a reason of Inductor's"))
    utils = torch_internals.cudagraph_utils
    monkeypatch.setattr(utils, "check_lowering_disable_cudagraph", lambda mapping: next(reasons))
    ours = FakeMaker()
    mine = torch.compile(program, backend=backend_of(ours))
    x = torch.ones(8, 8, requires_grad=True)
    mine(x).backward(torch.ones(8, 8))
    assert ours.directions == ["forward"]
    assert ours.graphed == [True, False]


def test_every_dispatched_name_is_a_method_of_the_maker() -> None:
    assert all(callable(getattr(EncoreMaker, name)) for name in DISPATCHED)
