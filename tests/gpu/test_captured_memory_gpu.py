"""Memory written by graphs of steps and callables is not shared with later recordings.

CUDAGraph Trees free cuBLAS's workspaces at each recording, and give what is free back to the device. What is allocated
next then lies where those workspaces lay. Here that is memory full of one number.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_harness import call, copy_reasons, encore, recordings
from step_parts import unaudited
from torch import nn

import optimizations
from optimizations.capture.device import Device
from optimizations.graph.pools import pool_memory
from optimizations.graph.recapture import recapture
from optimizations.in_place import budget
from optimizations.trees import node as node_module

pytestmark = pytest.mark.gpu

LONG, NARROW = 65536, 64
"""A product of a narrow and long matrix with another one is computed in parts, which are added up in a workspace."""

SENTINEL = 0x5A
SENTINEL_BYTES = 2**25
SENTINELS = 40
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def stock_records() -> Iterator[Callable[[], None]]:
    """A recording of stock's CUDAGraph Trees, each time of another size."""
    sizes = iter(range(8, 64, 8))

    def record() -> None:
        torch.compiler.reset()
        x = torch.randn(next(sizes), 16, device="cuda")
        compiled = torch.compile(lambda x: (x @ x.t()).relu(), mode="reduce-overhead", dynamic=False)
        for _ in range(3):
            compiled(x)
        torch.cuda.synchronize()

    yield record
    torch.compiler.reset()


def sentinels() -> list[torch.Tensor]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return [
        torch.full((SENTINEL_BYTES,), SENTINEL, dtype=torch.uint8, device="cuda")
        for _ in range(min(SENTINELS, torch.cuda.mem_get_info()[0] // SENTINEL_BYTES // 2))
    ]


def overwritten(memory: list[torch.Tensor]) -> int:
    torch.cuda.synchronize()
    return sum(int((one != SENTINEL).sum()) for one in memory)


class Narrow(nn.Module):
    """A narrow and long product in its forward, and one in its backward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(NARROW, NARROW, device="cuda", dtype=dtype) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = x @ self.weight
        return torch.relu(x.t() @ mixed) / LONG


def narrow_step(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A step that is graphed, and the same in eager."""
    steps = []
    for _ in range(2):
        model = Narrow(dtype)

        def step(x: torch.Tensor, model: nn.Module = model) -> list[torch.Tensor]:
            model.zero_grad()
            out = model(x)
            out.float().sum().backward()
            return [out.detach(), model.weight.grad.detach().clone()]  # type: ignore[union-attr]

        steps.append(step)
    return unaudited(steps[0]), steps[1]


def narrow_input(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(LONG, NARROW, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(dtype)


def close_to(mine: list[torch.Tensor], eager: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-3) for a, b in zip(mine, eager, strict=True))


def same(mine: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step_writes_no_memory_that_a_later_recording_freed(
    dtype: torch.dtype, stock_records: Callable[[], None]
) -> None:
    step, eager = narrow_step(dtype)
    x = narrow_input(dtype)
    for _ in range(5):
        before = step(x)
    assert step.report().replays == 2
    stock_records()
    memory = sentinels()
    for _ in range(3):
        after = step(x)
    assert step.report().replays == 5
    assert overwritten(memory) == 0
    assert same(after, before)
    assert close_to(after, eager(x))
    step.close()


@pytest.mark.parametrize("order", [[1, -1], [1, 1, -1, -1]], ids=str)
def test_callables_write_no_memory_that_a_later_recording_freed(
    order: list[int], stock_records: Callable[[], None]
) -> None:
    reference, module = Narrow(torch.float32), Narrow(torch.float32)
    x = narrow_input(torch.float32)
    group = optimizations.graph_callables(module, [x], order=order)

    def run(call: Any, of: nn.Module) -> list[torch.Tensor]:
        of.zero_grad()
        found = []
        waiting: list[torch.Tensor] = []
        for event in order:
            if event > 0:
                waiting.append(call(x))
                found.append(waiting[-1].detach().clone())
            else:
                waiting.pop(0).sum().backward()
        return [*found, of.weight.grad.clone()]  # type: ignore[union-attr,operator]

    before = run(group[0], module)
    stock_records()
    memory = sentinels()
    for _ in range(3):
        after = run(group[0], module)
    assert overwritten(memory) == 0
    assert same(after, before)
    assert close_to(after, run(reference, reference))
    assert group.calls_without_graph == 0
    group.close()


def product_captured_by_hand(x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture as PyTorch's guide does: the workspace is allocated in the warm-up, before the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            x.t() @ x
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        result = x.t() @ x
    return graph, result


def require_intact(graph: torch.cuda.CUDAGraph, result: torch.Tensor, expected: torch.Tensor) -> None:
    """Launches give what is expected and overwrite no other tensor."""
    memory = sentinels()
    for _ in range(3):
        result.zero_()
        graph.replay()
    assert overwritten(memory) == 0
    assert torch.equal(result, expected)


def test_hand_captured_graph_keeps_its_workspace_with_a_step() -> None:
    """Its workspace was allocated before the capture, as PyTorch's own guide has it. Nothing of Encore frees it."""
    x = narrow_input(torch.float32)
    graph, result = product_captured_by_hand(x)
    graph.replay()
    expected = result.clone()
    step, _ = narrow_step(torch.float32)
    for _ in range(5):
        step(x)
    group = optimizations.graph_callables(Narrow(torch.float32), [x])
    group[0](x).sum().backward()
    require_intact(graph, result, expected)
    step.close()
    group.close()


def test_hand_captured_graph_keeps_its_workspace_on_recapture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stock frees all workspaces at each recording, and the program captures after these."""
    captures = []

    def counted(*arguments: Any, **keywords: Any) -> Any:
        captures.append(arguments)
        return recapture(*arguments, **keywords)

    monkeypatch.setattr(node_module, "recapture", counted)
    monkeypatch.setattr(budget, "FEWEST_REPLAYS", 12)
    weight = torch.linspace(-1, 1, 64 * 64, device="cuda").view(64, 64)
    compiled = encore(lambda x: torch.relu(x @ weight) + x)
    kept = []

    def calls(count: int) -> None:
        for step in range(count):
            kept.append(torch.linspace(-step, 1, 16 * 64, device="cuda").view(16, 64))
            (result,) = call(compiled, kept[-1])
            torch.testing.assert_close(result, torch.relu(kept[-1] @ weight) + kept[-1], rtol=1e-2, atol=1e-1)

    calls(5)
    assert captures == []
    x = narrow_input(torch.float32)
    graph, result = product_captured_by_hand(x)
    graph.replay()
    expected = result.clone()
    calls(40)
    assert captures and any(one.indirect for report in recordings() for one in report.inputs), copy_reasons()
    require_intact(graph, result, expected)


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("multiplies", [True, False])
def test_matrix_products_on_own_streams_of_a_step_are_refused(multiplies: bool) -> None:
    side = torch.cuda.Stream()
    weight = torch.randn(32, 32, device="cuda")

    def step(x: torch.Tensor) -> torch.Tensor:
        outside = torch.cuda.current_stream()
        side.wait_stream(outside)
        with torch.cuda.stream(side):
            made = x @ weight if multiplies else x + weight
        outside.wait_stream(side)
        return (made @ weight).sum()

    graphed, x = unaudited(step), torch.randn(32, 32, device="cuda")
    expected = step(x)
    for _ in range(6):
        assert torch.equal(graphed(x), expected)
    report = graphed.report()
    if multiplies:
        assert "multiplies matrices on a stream" in report.refusals[0].reason
    else:
        assert report.refusals == ()
    assert report.replays == (0 if multiplies else 3)
    graphed.close()


def test_captured_step_uses_retained_workspaces() -> None:
    """The tests above require that: cuBLAS decides whether it needs a workspace."""
    step, _ = narrow_step(torch.float32)
    x = narrow_input(torch.float32)
    for _ in range(5):
        step(x)
    device = step._recorder.device  # type: ignore[attr-defined]
    (recording,) = step._recorder.recordings.tried  # type: ignore[attr-defined]
    kept = pool_memory(device.streams._used[-1].pool.id)
    assert len(kept) >= 1
    assert device.mentions(recording.graph.captured, kept)
    step.close()


def test_steps_on_two_streams_do_not_share_a_workspace() -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    steps = [narrow_step(torch.float32)[0] for _ in streams]
    inputs = [narrow_input(torch.float32) * (index + 1) for index in range(2)]
    expected = []
    for step, x in zip(steps, inputs, strict=True):
        for _ in range(5):
            alone = step(x)
        expected.append([one.clone() for one in alone])
    torch.cuda.synchronize()
    wrong = 0
    for _ in range(20):
        results = []
        for stream, step, x in zip(streams, steps, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(step(x))
        torch.cuda.synchronize()
        wrong += sum(not same(mine, alone) for mine, alone in zip(results, expected, strict=True))
    assert wrong == 0
    for step in steps:
        step.close()


@pytest.mark.alone
def test_sequence_of_steps_and_callables_needs_no_more_memory() -> None:
    x = narrow_input(torch.float32)
    reserved = []
    for _ in range(6):
        step, _ = narrow_step(torch.float32)
        for _ in range(5):
            step(x)
        step.close()
        group = optimizations.graph_callables(Narrow(torch.float32), [x])
        group[0](x).sum().backward()
        group.close()
        del step, group
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    print(f"reserved, in MiB: {[one >> 20 for one in reserved]}")
    assert reserved[-1] <= reserved[1] + 2**21


WIDE, HIDDEN, ROWS = 197951, 512, 256
"""Sizes of DeepRecommender: two weights of 386 MiB, of which autocast makes halves, and inputs of 193 MiB."""


def wide_training() -> Callable[[torch.Tensor], torch.Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, HIDDEN), nn.SELU(), nn.Linear(HIDDEN, WIDE)).cuda()
    compiled = torch.compile(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        with torch.autocast("cuda"):
            loss = compiled(x).float().square().mean()
        loss.backward()
        return loss.detach()

    return step


def test_pool_shrinks_where_forwards_reuse_gradient_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [torch.rand(ROWS, WIDE, device="cuda") for _ in range(3)]
    sizes, losses = [], []
    for has_room in (True, False):
        if not has_room:
            monkeypatch.setattr(Device, "make_room", lambda self, size_bytes: None)
        step = unaudited(wide_training())
        losses.append([step(x) for x in batches * 3])
        report = step.report()
        assert report.refusals == () and report.replays >= 4
        sizes.append(report.recordings[0].pool_bytes)
        step.close()
        del step
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    torch.testing.assert_close(*losses)
    assert sizes[0] < sizes[1], sizes
