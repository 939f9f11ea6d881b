"""Graphs that write passed buffers are safe from other writers, interrupts and unbounded recordings."""

from __future__ import annotations

import contextlib
import random
import weakref
from typing import Any

import pytest
import torch
from interrupts import interrupted_after, interrupted_at
from simulated_gpu.allocator import aligned
from simulated_gpu.compiler import CompiledOnCpu
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, nodes, values

import optimizations
from optimizations.trees import containers
from optimizations.trees.graphed_function import MOST_SIZES_OF_WRITERS
from optimizations.trees.moved_inputs import MOST_MISFITS, MOST_RECORDINGS
from tests.optimizations.trees.test_written_inputs import UNKNOWN, W, writing


def call(compiled: Compiled, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor = W) -> None:
    before = x.clone()
    compiled.checked(x, y, w)
    assert torch.equal(x, before + 1)


def test_unsuitable_buffers_do_not_end_other_graphs(cuda_on_cpu: CudaOnCpu) -> None:
    _, compiled = writing(cuda_on_cpu, UNKNOWN)
    buffers = [values(number) for number in range(MOST_RECORDINGS)]
    strays = [values(100 + number) for number in range(5)]
    for step in range(60):
        call(compiled, buffers[step % len(buffers)], values(step))
    for step in range(200):
        call(compiled, strays[step % 5], values(step))
        before = cuda_on_cpu.replays
        call(compiled, buffers[step % len(buffers)], values(step))
        assert cuda_on_cpu.replays == before + 1, step
    assert len(nodes()) == MOST_RECORDINGS


def test_iteration_with_other_caches_keeps_other_graphs(cuda_on_cpu: CudaOnCpu) -> None:
    """Each of the layers fits no recording in it."""
    _, compiled = writing(cuda_on_cpu, UNKNOWN)
    sets = [[values(10 * number + layer) for layer in range(MOST_MISFITS + 6)] for number in range(5)]

    def iteration(caches: list[torch.Tensor]) -> int:
        torch.compiler.cudagraph_mark_step_begin()
        before, h = cuda_on_cpu.replays, values(1)
        for cache in caches:
            (h,) = compiled.function([cache, h, W])
        return cuda_on_cpu.replays - before

    for number in range(4):
        for _ in range(6):
            iteration(sets[number])
    iteration(sets[4])
    assert iteration(sets[0]) > MOST_MISFITS
    assert compiled.functions[0].without_graph is None


@pytest.mark.parametrize("places", [2, 66, 130])
def test_one_function_runs_layers_with_own_caches(cuda_on_cpu: CudaOnCpu, places: int) -> None:
    """The first iterations replay none of their recordings: what was warmed up first was recorded last."""
    _, compiled = writing(cuda_on_cpu)
    caches = [values(number) for number in range(places)]
    for step in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        before, h = cuda_on_cpu.replays, values(step)
        for cache in caches:
            (h,) = compiled.function([cache, h, W])
        del h
    assert cuda_on_cpu.replays - before == places


def test_recordings_do_not_multiply_from_layer_to_layer(compiled_on_cpu: CompiledOnCpu) -> None:
    """Each layer's cache is chosen independently, so five layers have 1,024 combinations."""

    def layer(h: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.add_(h).remainder_(17)
        return cache * 2 + h * 0.5

    run = torch.compile(layer, backend="encore")
    layers, drawn = 5, random.Random(1)
    caches = [[aligned(16).fill_(number) for number in range(4)] for _ in range(layers)]
    twins = [[cache.clone() for cache in some] for some in caches]
    with torch.no_grad():
        for step in range(600):
            if step == 400:
                before = len(optimizations.recordings())
            torch.compiler.cudagraph_mark_step_begin()
            h = expected = aligned(16).fill_(step % 7)
            for some, others in zip(caches, twins, strict=True):
                which = drawn.randrange(4)
                h, expected = run(h, some[which]), layer(expected, others[which])
            assert torch.equal(h, expected), step
            del h
    now = len(optimizations.recordings())
    assert now <= 2 * layers * MOST_RECORDINGS
    assert before == now


@pytest.mark.parametrize("file", ["trees/node.py", "in_place/session.py", "in_place/addresses.py"])
def test_interrupt_while_buffers_change_is_harmless(cuda_on_cpu: CudaOnCpu, file: str) -> None:
    """The program catches it and continues: each call writes its own buffer only."""
    for line in range(1, 130):
        _, compiled = writing(cuda_on_cpu)
        buffers = [values(number) for number in range(6)]
        for step in range(12):
            x, y = buffers[step % 6], values(step)
            before = [buffer.clone() for buffer in buffers]
            torch.compiler.cudagraph_mark_step_begin()
            where = None
            try:
                if step == 4:
                    with interrupted_at(line, file) as where:
                        compiled.function([x, y, W])
                else:
                    compiled.function([x, y, W])
            except KeyboardInterrupt:
                assert torch.equal(x, before[step % 6]) or torch.equal(x, before[step % 6] + 1), where
            else:
                assert torch.equal(x, before[step % 6] + 1), (where, step)
            others = [index for index in range(6) if index != step % 6]
            assert all(torch.equal(buffers[index], before[index]) for index in others), (where, step)
        containers.free_all()


def test_interrupt_where_a_second_capture_begins_ends_it(cuda_on_cpu: CudaOnCpu) -> None:
    """A capture that never ends makes all later work of the program fail."""
    for number in range(400):
        compiled = Compiled(Model(cuda_on_cpu))
        inputs = [(values(step), values(step)) for step in range(6)]
        with interrupted_after(number, "graph/driver.py") as where, contextlib.suppress(KeyboardInterrupt):
            for x, y in inputs:
                compiled(x, y, W)
        assert cuda_on_cpu.capturing is None, where
        containers.free_all()
        if not where:
            break
    assert number > 20, "nothing was interrupted"


def test_buffer_released_by_the_program_is_freed(compiled_on_cpu: CompiledOnCpu) -> None:
    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x * 2

    run = torch.compile(write, backend="encore")
    let_go = []
    with torch.no_grad():
        for step in range(30):
            x = aligned(16).fill_(step)
            let_go.append(weakref.ref(x.untyped_storage()))
            run(x, aligned(16).fill_(1))
            del x
    assert sum(one() is not None for one in let_go) <= 1


def test_changing_index_is_not_recorded_for_every_value(compiled_on_cpu: CompiledOnCpu) -> None:
    """Stock captures no such function. Each index is another number."""

    def step(x: torch.Tensor, cache: torch.Tensor, place: int) -> torch.Tensor:
        cache.mul_(0.5).add_(x * place)
        return cache.sum(0) + x

    run = torch.compile(step, backend="encore", dynamic=True)
    # Where tensors begin is a number, too, by which programs differ: these begin where their memory does.
    cache = torch.ones(4, 16)
    twin = cache.clone()
    with torch.no_grad():
        for number in range(3 * 40):
            x, place = torch.full((16,), float(number)), number % 40 + 2
            assert torch.equal(run(x, cache, place), step(x, twin, place)), number
            assert torch.equal(cache, twin), number
    assert len(optimizations.report()) == 1
    assert 0 < len(optimizations.recordings()) <= MOST_SIZES_OF_WRITERS


def _itself(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.add_(y)
    return x


def _a_view(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.add_(y)
    return x[2:6]


def _transposed(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.add_(y)
    return x.view(4, 4).t()


@pytest.mark.parametrize("function", [_itself, _a_view, _transposed])
@pytest.mark.parametrize("buffers", [1, 2, 30])
def test_results_in_the_written_buffer_are_correct(compiled_on_cpu: CompiledOnCpu, function: Any, buffers: int) -> None:
    run = torch.compile(function, backend="encore")
    held = [aligned(16).fill_(number) for number in range(buffers)]
    with torch.no_grad():
        for step in range(40):
            x, y = held[step % buffers], aligned(16).fill_(step)
            twin = x.clone()
            out, expected = run(x, y), function(twin, y)
            assert torch.equal(out, expected) and torch.equal(x, twin), step
            out.mul_(0.5)
            expected.mul_(0.5)
            assert torch.equal(x, twin), "the program writes it through its result"
            del out
