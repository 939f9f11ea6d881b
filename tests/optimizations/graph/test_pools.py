"""Pools of graphs: workspaces, the order of captures, and memory that a capture displaces."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_gpu.allocator import DEFAULT, Block, Workspaces
from simulated_gpu.runtime import FakeStream

from optimizations.graph import recapture
from optimizations.graph.memory import each_once, memory_of, overlaps, size_bytes
from optimizations.graph.pools import (
    Pool,
    claim,
    end_failed_capture,
    failed_in_cusolver,
    in_order,
    new_pool,
    others_have_pools,
    pool_memory,
    scratch_pool,
    used_blocks,
    used_memory,
)
from optimizations.graph.recapture import GRANULE_BYTES, buffer_bytes, displace
from optimizations.graph.records import MemoryRange


def test_pool_holds_one_reference_until_it_is_freed(workspaces: Workspaces) -> None:
    pool = Pool(0)
    handle = pool.id
    assert workspaces.held == {handle: 1}
    assert workspaces.allocate("a tensor").pool == DEFAULT, "nothing else is allocated there"
    del pool
    gc.collect()
    assert workspaces.held == {handle: 0}


def test_scratch_pool_is_freed_after_its_block_and_on_errors(workspaces: Workspaces) -> None:
    with pytest.raises(ZeroDivisionError), scratch_pool(0) as handle:
        assert workspaces.held == {handle: 1}
        raise ZeroDivisionError
    assert workspaces.held == {handle: 0}


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("error", [None, RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")])
def test_memory_is_released_if_any_was_allocated(
    workspaces: Workspaces, monkeypatch: pytest.MonkeyPatch, is_used: bool, error: Exception | None
) -> None:
    """An allocator that refuses is ignored."""
    emptied = Mock(side_effect=error)
    monkeypatch.setattr(torch.cuda, "empty_cache", emptied)
    in_use = lambda pool, **_: workspaces.snapshot(pool) if workspaces.held[pool] else []  # noqa: E731
    monkeypatch.setattr(torch.cuda, "memory_snapshot", in_use)
    with scratch_pool(0) as handle:
        if is_used:
            workspaces.begin(0, handle)
            workspaces.allocate("a result")
            workspaces.end(0, handle)
            workspaces.release(0, handle)
        assert not emptied.called
    assert emptied.call_count == is_used
    assert workspaces.held == {handle: 0}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch, workspaces: Workspaces, side: Any, events: list[str]) -> list[str]:
    """Note captures among the events."""

    @contextlib.contextmanager
    def capture(graph: Any, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert (stream, capture_error_mode) == (side, "thread_local")
        events.append("a capture")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return events


def test_failed_capture_is_ended_once(workspaces: Workspaces, captures: list[str], side: Any) -> None:
    pool = workspaces.new_pool()
    workspaces.begin(0, pool)
    end_failed_capture(0, pool, side, in_cusolver=False)
    assert workspaces.allocate("a tensor").pool == DEFAULT
    expected = ["the side waits for the caller", "a capture", "the caller waits for the side"]
    assert captures == expected, "an empty one, which takes generators out of the one that failed"
    end_failed_capture(0, pool, side, in_cusolver=False)


@pytest.mark.parametrize("failures", [0, 1, 5])
def test_cusolver_failure_is_not_repeated(
    captures: list[str], side: Any, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    error = RuntimeError("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED")
    solve = Mock(side_effect=[*[error] * failures, None])
    monkeypatch.setattr(torch.linalg, "eigvalsh", solve)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: torch.empty(sizes))
    end_failed_capture(0, (0, 9), side, in_cusolver=True)
    assert solve.call_count == min(failures + 1, 2)


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


# Second captures use their own cuBLAS workspaces, and free none of a graph of the program.


OTHER_STREAM = SimpleNamespace(cuda_stream=50)
"""The stream of stock's manager."""
ENDS = 4096


def captured_again(simulated: Workspaces) -> tuple[Block, bool]:
    """Return a product's workspace in a second capture, and whether that counts as the capture's memory."""
    with scratch_pool(0) as pool, recapture._own_workspace(0, OTHER_STREAM, pool) as (used, others):  # type: ignore[arg-type]
        simulated.begin(0, pool)
        with simulated.on(used):
            found = simulated.use()
        simulated.end(0, pool)
        simulated.release(0, pool)
        owned = [*pool_memory(pool), *(one for other in others for one in pool_memory(other))]
    return found, any(one.address <= found.number * ENDS < one.address + one.size_bytes for one in owned)


def captured_by_hand(simulated: Workspaces) -> Block:
    """Capture a graph by hand: its workspace exists before, its results are in a pool."""
    with simulated.on(7):
        workspace = simulated.use()
        pool = simulated.new_pool()
        simulated.begin(0, pool)
        simulated.allocate("a result")
        simulated.end(0, pool)
    return workspace


def test_all_workspaces_are_freed_where_the_program_has_no_pool(workspaces: Workspaces) -> None:
    with workspaces.on(7):
        before = workspaces.use()
    found, owned = captured_again(workspaces)
    assert owned and found.pool != DEFAULT
    assert before.gone and found.gone, "no memory stays"


def test_graph_captured_by_hand_keeps_its_workspace(workspaces: Workspaces) -> None:
    by_hand = captured_by_hand(workspaces)
    found, owned = captured_again(workspaces)
    assert owned and found is not by_hand
    workspaces.empty_cache()
    with workspaces.on(7):
        tensors = [workspaces.allocate("a tensor") for _ in range(5)]
    assert not by_hand.gone and by_hand not in tensors


def test_second_captures_reuse_one_workspace(workspaces: Workspaces) -> None:
    captured_by_hand(workspaces)
    first, _ = captured_again(workspaces)
    count = len(workspaces.blocks)
    for _ in range(3):
        found, owned = captured_again(workspaces)
        assert found is first and owned
    assert len(workspaces.blocks) == count
    workspaces.clear()
    assert first.gone, "a recording of stock's gives it back to the device"
    found, owned = captured_again(workspaces)
    assert owned and found is not first


def test_pools_of_encore_are_not_the_programs(workspaces: Workspaces) -> None:
    for pool in (new_pool(), new_pool()):
        workspaces.begin(0, pool)
        workspaces.allocate("a result")
        workspaces.end(0, pool)
    workspaces.allocate("a tensor")
    assert not others_have_pools()
    of_the_manager: Any = workspaces.new_pool()
    workspaces.begin(0, of_the_manager)
    workspaces.allocate("a result")
    assert others_have_pools()
    claim(of_the_manager)
    assert not others_have_pools()


@pytest.mark.parametrize("rounds", range(1, 4))
def test_capture_after_a_failed_one_is_correct(workspaces: Workspaces, rounds: int) -> None:
    captured_by_hand(workspaces)
    for _ in range(rounds):
        with (
            pytest.raises(ValueError, match="within"),
            scratch_pool(0) as pool,
            recapture._own_workspace(0, OTHER_STREAM, pool) as (used, _),  # type: ignore[arg-type]
        ):
            workspaces.begin(0, pool)
            with workspaces.on(used):
                workspaces.use()
            workspaces.end(0, pool)
            workspaces.release(0, pool)
            raise ValueError("within")
    _, owned = captured_again(workspaces)
    assert owned


# Streams of captures and of their callers wait for each other.


class Stream(FakeStream):
    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__()
        self._name, self._events = name, events

    def wait_stream(self, other: Any) -> None:
        self._events.append(f"{self._name} waits for {other._name}")


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> Any:
    caller = Stream("the caller", events)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Stream("the side", events)


@pytest.mark.parametrize("capturing", [False, True])
def test_nothing_waits_for_a_failed_capture_under_way(
    side: Any, events: list[str], capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's stream would join that capture."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with pytest.raises(KeyError), in_order(side):
        raise KeyError
    assert events[1:] == ([] if capturing else ["the caller waits for the side"])


# Inputs of a second capture get distinguishable distances and the first ones' alignment in little memory.


ranges = st.dictionaries(
    st.integers(0, 40),
    st.builds(
        lambda address, size: MemoryRange(address=address * 16, size_bytes=size),
        st.integers(1, 2**30),
        st.integers(1, 2**20),
    ),
    max_size=30,
)


@given(ranges, st.integers(1, 2**20))
def test_distances_differ_and_no_difference_of_two_is_a_distance(memory: dict[int, MemoryRange], start: int) -> None:
    start *= GRANULE_BYTES
    places = displace(memory, start)
    distances = [start + places[index] - one.address for index, one in memory.items()]
    assert len(set(distances)) == len(distances)
    assert 0 not in distances
    differences = {one - other for one, other in itertools.permutations(distances, 2)}
    assert differences.isdisjoint(distances)
    assert all((start + places[index]) % GRANULE_BYTES == one.address % GRANULE_BYTES for index, one in memory.items())
    assert all(places[index] + one.size_bytes <= buffer_bytes(memory) for index, one in memory.items())


def test_many_small_inputs_take_little_memory() -> None:
    """1,500 inputs of 93 KB in all once took 1.1 GB."""
    memory = {index: MemoryRange(address=2**30 + 512 * index, size_bytes=62) for index in range(1500)}
    assert buffer_bytes(memory) < 4 * 2**20


def test_memory_spans_the_first_to_the_last_element() -> None:
    whole = torch.zeros(10, 10)
    view = whole[2:5, 1:3]
    assert memory_of(view) == MemoryRange(address=whole.data_ptr() + 21 * 4, size_bytes=(2 * 10 + 2) * 4)
    assert size_bytes(torch.zeros(3, 0)) == 0
    assert size_bytes(torch.zeros(1).expand(7)) == 4


def test_each_element_of_a_tensor_that_overlaps_is_written_once() -> None:
    for shape, strides in (((3, 4), (0, 1)), ((4, 3), (5, 0)), ((3, 3), (2, 1)), ((2, 3, 4), (30, 0, 2)), ((), ())):
        source, target = (torch.rand(70).as_strided(shape, strides, 3) for _ in range(2))
        assert overlaps(source) == bool(shape)
        if shape:
            each_once(target).copy_(each_once(source))
            assert torch.equal(source, target)
    for shape, strides in (((3, 4), (4, 1)), ((3, 4), (9, 2)), ((1, 4), (0, 1)), ((0, 4), (1, 0)), ((4, 0), (0, 1))):
        assert not overlaps(torch.rand(70).as_strided(shape, strides))
