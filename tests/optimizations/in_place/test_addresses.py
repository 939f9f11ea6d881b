"""Moved inputs are patched, unmoved ones cost nothing, and inputs that cannot be read in place are copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_gpu.allocator import aligned

from optimizations.graph.memory import MemoryRanges
from optimizations.graph.records import MemoryRange
from optimizations.in_place.addresses import AddressTracker, TrackedInput


class FakePointers:
    def __init__(self) -> None:
        self.pointed: list[dict[int, int]] = []
        self.settled = 0
        self.fail = False

    def point(self, addresses: Mapping[int, int]) -> int:
        if self.fail:
            raise RuntimeError("driver")
        self.pointed.append(dict(addresses))
        return 8 * len(addresses)

    def settle(self) -> None:
        self.settled += 1


PLACEHOLDER = 4096


def tracker_of(
    pointers: FakePointers,
    *inputs: TrackedInput,
    owned: MemoryRanges | None = None,
    recorded: Sequence[int | None] = (0, None, 0),
    filled: list[tuple[int, torch.Tensor]] | None = None,
) -> AddressTracker:
    tracked = inputs or (TrackedInput(0, 16, PLACEHOLDER), TrackedInput(2, 16, PLACEHOLDER))
    fills = filled if filled is not None else []
    return AddressTracker(
        tracked, recorded, pointers, owned or MemoryRanges([]), lambda values: fills.extend(values.items())
    )


def test_only_moved_inputs_are_patched() -> None:
    pointers = FakePointers()
    tracker = tracker_of(pointers)
    a, b, c = aligned(4), aligned(4), aligned(4)
    tracker.follow([a, 17, b])
    assert pointers.pointed == [{0: a.data_ptr(), 2: b.data_ptr()}]
    tracker.follow([a, 18, b])
    assert len(pointers.pointed) == 1
    tracker.follow([a, 18, c])
    assert pointers.pointed[1:] == [{2: c.data_ptr()}]
    assert (tracker.moves, tracker.pointer_bytes, tracker.placeholder_bytes) == (2, 24, 0)


def test_first_call_without_moves_is_reported_once() -> None:
    pointers = FakePointers()
    tracker = tracker_of(pointers)
    a, b = aligned(4), aligned(4)
    told = []
    for first in (a, a, a, b, b, b):
        tracker.follow([first, None, a])
        tracker.launched()
        told.append(pointers.settled)
    assert told == [0, 1, 1, 1, 2, 2]


def test_addresses_of_unlaunched_calls_are_ignored() -> None:
    pointers = FakePointers()
    tracker = tracker_of(pointers)
    a, b = aligned(4), aligned(4)
    tracker.follow([a, None, a])
    tracker.launched()
    tracker.follow([b, None, a])  # interrupted before its launch
    tracker.follow([b, None, a])
    assert pointers.settled == 0, "the launch to come must still write them"
    tracker.launched()
    tracker.follow([b, None, a])
    assert pointers.settled == 1


def test_callers_tensors_stay_in_the_list_until_the_launch() -> None:
    tracker = tracker_of(FakePointers())
    inputs: list[Any] = [aligned(4), None, aligned(4)]
    tensors = list(inputs)
    tracker.follow(inputs)
    assert all(a is b for a, b in zip(inputs, tensors, strict=True))


@given(st.integers(0, 7), st.sampled_from([4, 16, 32, 256]))
def test_misaligned_input_is_copied_into_its_placeholder(offset: int, alignment: int) -> None:
    pointers, filled = FakePointers(), []
    tracker = tracker_of(pointers, TrackedInput(0, alignment, PLACEHOLDER), filled=filled)
    tensor = aligned(8, offset=offset)
    tracker.follow([tensor, None, None])
    in_place = offset * 4 % alignment == 0
    assert pointers.pointed == [{0: tensor.data_ptr() if in_place else PLACEHOLDER}]
    assert [(index, value is tensor) for index, value in filled] == ([] if in_place else [(0, True)])
    assert tracker.placeholder_bytes == (0 if in_place else tensor.nbytes)


def test_placeholder_may_move_after_it_is_filled() -> None:
    pointers, elsewhere = FakePointers(), 2 * PLACEHOLDER
    tracker = AddressTracker(
        [TrackedInput(0, 16, PLACEHOLDER)],
        [0],
        pointers,
        MemoryRanges([]),
        lambda values: dict.fromkeys(values, elsewhere),
    )
    misaligned, other = aligned(8, offset=1), aligned(8)
    for one in (misaligned, misaligned, other, misaligned):
        tracker.follow([one])
        tracker.launched()
    assert pointers.pointed == [{0: elsewhere}, {0: other.data_ptr()}, {0: elsewhere}]


def test_failed_update_patches_all_inputs_again() -> None:
    pointers = FakePointers()
    tracker = tracker_of(pointers)
    a, b, c = aligned(4), aligned(4), aligned(4)
    tracker.follow([a, None, b])
    pointers.fail = True
    with pytest.raises(RuntimeError, match="driver"):
        tracker.follow([c, None, b])
    pointers.fail = False
    tracker.follow([a, None, b])
    assert pointers.pointed[-1] == {0: a.data_ptr()}, "the failed call may have left c there"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=6), st.integers(0, 300), st.integers(0, 40))
def test_memory_ranges_are_searched_by_address_and_by_range(
    blocks: list[tuple[int, int]], address: int, size: int
) -> None:
    ranges = [MemoryRange(address=start * 8, size_bytes=length) for start, length in blocks]
    memory = MemoryRanges(ranges)
    assert (address in memory) == any(address in one for one in ranges)
    places = range(address, address + size)
    assert memory.overlap(address, size) == any(place in one for one in ranges for place in places)


def memory(tensor: torch.Tensor) -> MemoryRange:
    return MemoryRange(address=tensor.data_ptr(), size_bytes=tensor.nbytes)


def writing_tracker(
    pointers: FakePointers, weight: torch.Tensor, filled: list[Any], *, size_bytes: int = 1
) -> AddressTracker:
    """Track a graph that reads input 0 of this size in place and writes input 1 at a fixed address."""
    return AddressTracker(
        [TrackedInput(0, 16, PLACEHOLDER, size_bytes=size_bytes)],
        [PLACEHOLDER, None],
        pointers,
        MemoryRanges([memory(weight)]),
        filled.extend,
    )


def test_view_of_written_memory_is_copied() -> None:
    pointers, filled = FakePointers(), []  # type: ignore[var-annotated]
    weight, apart = aligned(64), aligned(64)
    tracker = writing_tracker(pointers, weight, filled)
    tracker.follow([apart, weight])
    assert (tracker.addresses[0], filled) == (apart.data_ptr(), [])
    for _ in range(2):
        tracker.follow([weight[16:], weight])
        assert tracker.addresses[0] == PLACEHOLDER
    assert filled == [0, 0]
    tracker.follow([apart, weight])
    assert (tracker.addresses[0], filled) == (apart.data_ptr(), [0, 0])


@pytest.mark.parametrize(("begins", "copied"), [(0, True), (12, True), (28, False)])
def test_input_reaching_into_written_memory_is_copied(begins: int, copied: bool) -> None:
    """It begins before the buffer's memory, which is a view with its own storage, as from DLPack."""
    pointers, filled = FakePointers(), []  # type: ignore[var-annotated]
    whole = aligned(64)
    weight, x = whole[32:], whole[begins:][: 40 if copied else 4]
    tracker = writing_tracker(pointers, weight, filled, size_bytes=x.nbytes)
    tracker.follow([x, weight])
    assert (tracker.addresses[0], filled) == ((PLACEHOLDER, [0]) if copied else (x.data_ptr(), []))
