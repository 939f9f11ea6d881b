"""When addresses are written again, and which inputs cannot be read in place."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
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


def tracker_of(pointers: FakePointers) -> AddressTracker:
    tracked = TrackedInput(0, 16, PLACEHOLDER), TrackedInput(2, 16, PLACEHOLDER)
    return AddressTracker(tracked, (0, None, 0), pointers, MemoryRanges([]), lambda values: None)


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


@pytest.mark.parametrize(("begins", "copied"), [(0, True), (12, True), (28, False)])
def test_input_reaching_into_written_memory_is_copied(begins: int, copied: bool) -> None:
    """It begins before the buffer's memory, which is a view with its own storage, as from DLPack."""
    whole, filled = aligned(64), list[int]()
    weight, x = whole[32:], whole[begins:][: 40 if copied else 4]
    written = MemoryRanges([MemoryRange(address=weight.data_ptr(), size_bytes=weight.nbytes)])
    read = TrackedInput(0, 16, PLACEHOLDER, size_bytes=x.nbytes)
    tracker = AddressTracker([read], [PLACEHOLDER, None], FakePointers(), written, filled.extend)
    tracker.follow([x, weight])
    assert (tracker.addresses[0], filled) == ((PLACEHOLDER, [0]) if copied else (x.data_ptr(), []))
