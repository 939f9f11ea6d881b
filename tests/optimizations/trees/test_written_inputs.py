"""Inputs that a function writes and that are no parameters: caches and buffers that the program passes.

Stock runs such functions without a graph. Note [Inputs that are written] in `trees.graphed_function`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from interrupts import interrupted_after, interrupted_at
from simulated_gpu.allocator import aligned
from simulated_gpu.compiler import CompiledOnCpu
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import COUNT, KNOWN, Compiled, Model, nodes, values
from torch import nn

import optimizations
from optimizations.in_place.generated import GeneratedCode
from optimizations.trees import containers
from optimizations.trees.graphed_function import MOST_SIZES_OF_WRITERS
from optimizations.trees.moved_inputs import MOST_MISFITS, MOST_RECORDINGS
from optimizations.trees.reasons import INPUT_KEEPS_MOVING, WRITES_INPUT

W = values(7)
UNKNOWN = GeneratedCode(None)


def writing(cuda: CudaOnCpu, code: GeneratedCode = KNOWN, **keywords: Any) -> tuple[Model, Compiled]:
    model = Model(cuda, writes_x=True, code=code)
    return model, Compiled(model, **{"mutated_input_idxs": (0,), **keywords})


def call(compiled: Compiled, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    before = x.clone()
    results = compiled.checked(x, y, W)
    assert torch.equal(x, before + 1)
    return results


def check(compiled: Compiled, buffers: Sequence[torch.Tensor], calls: int) -> None:
    """Call with these buffers alternately, and with new other inputs."""
    kept = []
    for step in range(calls):
        kept.append(values(2 * step))
        call(compiled, buffers[step % len(buffers)], kept[-1])


def test_fixed_buffer_is_written_in_place(cuda_on_cpu: CudaOnCpu) -> None:
    model, compiled = writing(cuda_on_cpu, UNKNOWN)
    check(compiled, [values(1)], calls=20)
    (node,) = nodes()
    assert node.replays == 18
    assert node.copied_per_replay == 4 * COUNT, "what else moves is copied: it could only be tried out"
    assert compiled.uncaptured() == {}
    assert model.runs.count("plain") < 5
    (report,) = compiled.reports
    assert report.steady_replays > 10


@pytest.mark.parametrize("count", [2, 3])
def test_alternating_buffers_are_written_in_place(cuda_on_cpu: CudaOnCpu, count: int) -> None:
    _, compiled = writing(cuda_on_cpu)
    buffers = [values(10 * number) for number in range(count)]
    check(compiled, buffers, calls=10 * count)
    assert len(compiled.reports) <= MOST_RECORDINGS
    before = sum(report.replays for report in compiled.reports)
    check(compiled, buffers, calls=4 * count)
    assert sum(report.replays for report in compiled.reports) >= before + 4 * count - MOST_RECORDINGS


def test_new_buffers_stop_being_recorded(cuda_on_cpu: CudaOnCpu) -> None:
    _, compiled = writing(cuda_on_cpu, UNKNOWN)
    calls = 3 * MOST_RECORDINGS + MOST_MISFITS + 10
    buffers = [values(number) for number in range(calls)]
    check(compiled, buffers, calls=calls)
    assert len(compiled.reports) == MOST_RECORDINGS
    assert compiled.uncaptured()[INPUT_KEEPS_MOVING] > MOST_MISFITS
    assert compiled.functions[0].without_graph == INPUT_KEEPS_MOVING
    assert not nodes(), "stock has no memory for its graphs either"


@pytest.mark.parametrize("which", ["backward", "several partitions", "not by Inductor", "unaligned"])
def test_unsupported_functions_are_left_to_stock(cuda_on_cpu: CudaOnCpu, which: str) -> None:
    settings: dict[str, Any] = {"is_backward": which == "backward", "is_inference": which != "backward"}
    if which == "several partitions":
        settings.update(code=dataclasses.replace(KNOWN, is_partition=True))
    if which == "not by Inductor":
        settings.update(code=dataclasses.replace(KNOWN, written=frozenset({0})), mutated_input_idxs=())
    model, compiled = writing(cuda_on_cpu, **settings)
    check(compiled, [values(1, offset=int(which == "unaligned"))], calls=8)
    assert set(compiled.uncaptured()) == {WRITES_INPUT}
    assert set(model.runs) == {"plain"}


def test_result_passed_as_written_buffer_is_correct(cuda_on_cpu: CudaOnCpu) -> None:
    """It is in the graph's memory, or in a copy of the caller's."""
    _, compiled = writing(cuda_on_cpu)
    x = values(1)
    for step in range(40):
        (out,) = call(compiled, x, values(step))
        x = out if step % 3 else out.clone()
        x.remainder_(100)


def test_iteration_starts_with_bounded_recordings(cuda_on_cpu: CudaOnCpu) -> None:
    """One function for all layers, each with a cache of its own, and results that are gone before the next call."""
    _, compiled = writing(cuda_on_cpu)
    caches = [values(number) for number in range(24)]
    for step in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        before = sum(report.replays for report in compiled.reports)
        for cache in caches:
            was, y = cache.clone(), values(step)
            (out,) = compiled.function([cache, y, W])
            assert torch.equal(cache, was + 1)
            del out
    assert all(function.without_graph is None for function in compiled.functions)
    assert sum(report.replays for report in compiled.reports) == before + MOST_RECORDINGS


class Averaging(nn.Module):
    mean: torch.Tensor
    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", aligned(64))
        self.register_buffer("places", torch.arange(0, 64, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean[self.places] = x.tanh().sum() * 0.1
        return x * self.mean.sum()  # reads `x` after that


def drawn(seed: int) -> torch.Tensor:
    return aligned(64).copy_(torch.randn(64, generator=torch.Generator().manual_seed(seed)))


def test_view_of_written_memory_is_copied_as_by_stock(compiled_on_cpu: CompiledOnCpu) -> None:
    net, twin = Averaging(), Averaging()
    run = torch.compile(net, backend="encore")
    with torch.no_grad():
        for step in range(24):
            x = drawn(step)
            torch.testing.assert_close(run(x), twin(x))
        assert any(one.indirect for report in optimizations.recordings() for one in report.inputs)
        for _ in range(4):
            torch.testing.assert_close(run(net.mean.view(64)), twin(twin.mean.clone()))
            torch.testing.assert_close(net.mean, twin.mean)


# Such graphs are safe from other writers, interrupts and unbounded recordings.


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
