"""Memory pools: calls of PyTorch's allocator, and when memory is returned to the device."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import FakeStream

from optimizations import torch_internals
from optimizations.graph.memory import MemoryRanges
from optimizations.graph.pools import (
    Pool,
    SmallSegments,
    end_failed_capture,
    failed_in_cusolver,
    scratch_pool,
    used_blocks,
    used_memory,
)
from optimizations.graph.records import MemoryRange

STREAM: Any = FakeStream(50)


class Allocator:
    """PyTorch's, as far as pools go: references by pool, and a size for all of them."""

    def __init__(self) -> None:
        self.references: dict[Any, int] = {}
        self.allocating: set[Any] = set()
        self.size = 0
        self.emptied = 0
        self.captures = 0
        self.ordered: list[str] = []

    def begin(self, device: int, pool: Any) -> None:
        self.references[pool] = self.references.get(pool, 0) + 1
        self.allocating.add(pool)

    def end(self, device: int, pool: Any) -> None:
        if pool not in self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating.remove(pool)

    def release(self, device: int, pool: Any) -> None:
        self.references[pool] -= 1

    def empty_cache(self) -> None:
        self.emptied += 1

    @contextlib.contextmanager
    def capture(self, graph: Any, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert (stream, capture_error_mode) == (STREAM, "thread_local")
        assert self.ordered == ["the stream waits"]
        self.captures += 1
        yield

    def segments(self, pool: Any, include_traces: bool = True) -> list[dict[str, int]]:
        assert self.references[pool] > 0, "read before it goes"
        return [{"address": 4096, "total_size": self.size}]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    handles = iter(range(1, 1000))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    monkeypatch.setattr(torch.cuda, "empty_cache", found.empty_cache)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    outside = FakeStream(7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: outside)
    monkeypatch.setattr(STREAM, "wait_stream", lambda other: found.ordered.append("the stream waits"), raising=False)
    monkeypatch.setattr(outside, "wait_stream", lambda other: found.ordered.append("the caller's waits"), raising=False)
    monkeypatch.setattr(torch.cuda, "graph", found.capture)
    monkeypatch.setattr(torch_internals, "begin_allocating", found.begin)
    monkeypatch.setattr(torch_internals, "end_allocating", found.end)
    monkeypatch.setattr(torch_internals, "release_pool", found.release)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", found.segments)
    return found


def test_small_segments_are_queried_for_new_addresses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [{"address": 4096, "total_size": 4096}, {"address": 8192, "total_size": 8192}]
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda pool, **_: asked.append(pool) or segments)
    small = SmallSegments((0, 7), 4096)
    assert [small.hold(address) for address in (5000, 9000, 4096, 16383)] == [True, False, True, False]
    assert asked == [(0, 7)]
    assert not small.hold(1 << 20) and not small.hold(1 << 20)
    assert len(asked) == 2, "an address in no segment is looked for once"
    segments.append({"address": 1 << 21, "total_size": 512})
    assert small.hold(1 << 21)


def test_pool_holds_one_reference_until_it_is_freed(allocator: Allocator) -> None:
    pool = Pool(0)
    handle = pool.id
    assert allocator.references == {handle: 1}
    assert not allocator.allocating, "nothing else is allocated there"
    del pool
    gc.collect()
    assert allocator.references == {handle: 0}


def test_scratch_pool_is_freed_after_its_block_and_on_errors(allocator: Allocator) -> None:
    with pytest.raises(ZeroDivisionError), scratch_pool(0) as handle:
        assert allocator.references == {handle: 1}
        raise ZeroDivisionError
    assert allocator.references == {handle: 0}


@pytest.mark.parametrize("size", [0, 2**21])
def test_memory_is_released_if_any_was_allocated(allocator: Allocator, size: int) -> None:
    allocator.size = size
    with scratch_pool(0):
        assert allocator.emptied == 0
    assert allocator.emptied == (1 if size else 0)


def test_allocator_that_refuses_to_free_memory_is_ignored(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    allocator.size = 2**21
    with scratch_pool(0) as handle:
        pass
    assert allocator.references == {handle: 0}


def test_failed_capture_is_ended_once(allocator: Allocator) -> None:
    allocator.begin(0, (0, 9))
    end_failed_capture(0, (0, 9), STREAM, in_cusolver=False)
    assert not allocator.allocating
    assert allocator.captures == 1, "an empty one, which takes generators out of the one that failed"
    assert allocator.ordered == ["the stream waits", "the caller's waits"]
    allocator.ordered.clear()
    end_failed_capture(0, (0, 9), STREAM, in_cusolver=False)


@pytest.mark.parametrize("failures", [0, 1, 5])
def test_cusolver_failure_is_not_repeated(allocator: Allocator, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    solved: list[bool] = []

    def eigvalsh(matrix: torch.Tensor) -> None:
        solved.append(len(solved) >= failures)
        if not solved[-1]:
            raise RuntimeError("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED")

    monkeypatch.setattr(torch.linalg, "eigvalsh", eigvalsh)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: torch.empty(sizes))
    end_failed_capture(0, (0, 9), STREAM, in_cusolver=True)
    assert solved == {0: [True], 1: [False, True], 5: [False, False]}[failures]


def test_cusolver_failure_is_found_after_the_captures() -> None:
    """The call that ends the capture raises its own error."""
    try:
        try:
            raise RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnXsyevd(...)`")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
    except RuntimeError as error:
        assert failed_in_cusolver(error)
        error.__context__ = None
        assert not failed_in_cusolver(error)


def test_segments_that_adjoin_are_one() -> None:
    sizes = {300: 50, 100: 100, 200: 100, 400: 10}
    found = MemoryRanges(MemoryRange(address=address, size_bytes=size) for address, size in sizes.items()).ranges
    assert [(one.address, one.size_bytes) for one in found] == [(100, 250), (400, 10)]


def test_used_and_free_memory_of_a_pool_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    states = ["active_allocated", "inactive", "active_pending_free", "active_allocated", "inactive"]
    blocks = [{"size": 512 * (place + 1), "state": state} for place, state in enumerate(states)]
    segments = [{"address": 4096, "blocks": blocks}, {"address": 65536, "blocks": [{"size": 512, "state": "inactive"}]}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda *pool, **options: segments)
    assert [one.size_bytes for one in used_blocks((0, 7))] == [512, 1536, 2048]
    assert used_memory((0, 7)) == (
        MemoryRange(address=4096, size_bytes=512),
        MemoryRange(address=4096 + 1536, size_bytes=1536 + 2048),
    )
