"""Moved inputs are noticed and pointed at, unmoved ones cost nothing, and what cannot be read in place is copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_work import aligned

from optimizations.captured.graph import MemoryRange
from optimizations.replay.addresses import FollowedInput, Follower, OwnedMemory


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


def follower_of(pointers: FakePointers, *inputs: FollowedInput, owned: OwnedMemory | None = None) -> Follower:
    return Follower(inputs or (FollowedInput(0, 16), FollowedInput(2, 16)), 3, pointers, owned or OwnedMemory([]))


def test_only_moved_inputs_are_pointed_at() -> None:
    pointers = FakePointers()
    follower = follower_of(pointers)
    a, b, c = aligned(4), aligned(4), aligned(4)
    follower.follow([a, 17, b])
    assert pointers.pointed == [{0: a.data_ptr(), 2: b.data_ptr()}]
    follower.follow([a, 18, b])
    assert len(pointers.pointed) == 1
    follower.follow([a, 18, c])
    assert pointers.pointed[1:] == [{2: c.data_ptr()}]
    assert (follower.moves, follower.pointer_bytes, follower.stand_in_bytes) == (2, 24, 0)


def test_the_first_call_without_moves_is_told_once() -> None:
    pointers = FakePointers()
    follower = follower_of(pointers)
    a, b = aligned(4), aligned(4)
    told = []
    for first in (a, a, a, b, b, b):
        follower.follow([first, None, a])
        follower.launched()
        told.append(pointers.settled)
    assert told == [0, 1, 1, 1, 2, 2]


def test_addresses_of_a_call_that_never_launched_are_not_taken_for_written() -> None:
    pointers = FakePointers()
    follower = follower_of(pointers)
    a, b = aligned(4), aligned(4)
    follower.follow([a, None, a])
    follower.launched()
    follower.follow([b, None, a])  # interrupted before its launch
    follower.follow([b, None, a])
    assert pointers.settled == 0, "the launch to come must still write them"
    follower.launched()
    follower.follow([b, None, a])
    assert pointers.settled == 1


def test_what_a_call_that_never_launched_had_copied_is_not_written_back_later() -> None:
    follower = follower_of(FakePointers(), FollowedInput(0, 16, mutated=True))
    misaligned = aligned(8, offset=1).fill_(1.0)
    follower.follow([misaligned, None, None])  # interrupted before its launch
    misaligned.fill_(7.0)
    follower.follow([aligned(8), None, None])
    follower.launched()
    assert torch.equal(misaligned, torch.full((8,), 7.0))


def test_callers_tensors_stay_in_the_list_until_the_launch() -> None:
    follower = follower_of(FakePointers())
    inputs: list[Any] = [aligned(4), None, aligned(4)]
    tensors = list(inputs)
    follower.follow(inputs)
    assert all(a is b for a, b in zip(inputs, tensors, strict=True))


@given(st.integers(0, 7), st.sampled_from([4, 16, 32, 256]))
def test_a_misaligned_input_is_replaced_by_an_aligned_copy(offset: int, alignment: int) -> None:
    pointers = FakePointers()
    follower = follower_of(pointers, FollowedInput(0, alignment))
    tensor = aligned(8, offset=offset).copy_(torch.arange(8))
    inputs: list[Any] = [tensor, None, None]
    follower.follow(inputs)
    in_place = offset * 4 % alignment == 0
    assert (inputs[0] is tensor) == in_place
    assert torch.equal(inputs[0], tensor)
    assert pointers.pointed == [{0: inputs[0].data_ptr()}]
    assert (follower.stand_in_bytes > 0) != in_place


def test_a_misaligned_input_is_copied_in_each_call() -> None:
    pointers = FakePointers()
    follower = follower_of(pointers, FollowedInput(0, 16))
    tensor = aligned(8, offset=1)
    for value in (1.0, 2.0):
        tensor.fill_(value)
        inputs: list[Any] = [tensor, None, None]
        follower.follow(inputs)
        assert inputs[0] is not tensor
        assert torch.equal(inputs[0], tensor)


def test_a_copy_keeps_the_strides_the_kernels_were_compiled_for() -> None:
    follower = follower_of(FakePointers(), FollowedInput(0, 16))
    tensor = aligned(32, offset=1).view(4, 8)[:, ::2].t()
    inputs: list[Any] = [tensor, None, None]
    follower.follow(inputs)
    assert inputs[0] is not tensor
    assert inputs[0].stride() == tensor.stride()
    assert torch.equal(inputs[0], tensor)


def test_what_the_graph_wrote_into_a_copy_is_written_back_after_the_launch_and_only_once() -> None:
    follower = follower_of(FakePointers(), FollowedInput(0, 16, mutated=True))
    tensor = aligned(8, offset=1).fill_(1.0)
    inputs: list[Any] = [tensor, None, None]
    follower.follow(inputs)
    inputs[0].fill_(5.0)
    assert tensor[0] == 1.0
    follower.launched()
    assert torch.equal(tensor, torch.full((8,), 5.0))
    tensor.fill_(2.0)
    follower.launched()
    assert tensor[0] == 2.0


def test_memory_of_the_graph_is_copied_first() -> None:
    own = aligned(8)
    owned = OwnedMemory([MemoryRange(address=own.data_ptr(), size_bytes=32)])
    follower = follower_of(FakePointers(), FollowedInput(0, 16, mutated=True), FollowedInput(2, 16), owned=owned)
    inputs: list[Any] = [aligned(8), None, own]
    assert not follower.writes_owned_memory(inputs)
    follower.follow(inputs)
    assert inputs[2] is not own
    assert follower.writes_owned_memory([own, None, None])


def test_after_a_failed_update_everything_is_pointed_at_again() -> None:
    pointers = FakePointers()
    follower = follower_of(pointers)
    a, b, c = aligned(4), aligned(4), aligned(4)
    follower.follow([a, None, b])
    pointers.fail = True
    with pytest.raises(RuntimeError, match="driver"):
        follower.follow([c, None, b])
    pointers.fail = False
    follower.follow([a, None, b])
    assert pointers.pointed[-1] == {0: a.data_ptr()}, "the failed call may have left c there"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), max_size=6), st.integers(0, 300))
def test_owned_memory_is_searched_by_range(blocks: list[tuple[int, int]], address: int) -> None:
    ranges = [MemoryRange(address=start * 8, size_bytes=size) for start, size in blocks]
    assert (address in OwnedMemory(ranges)) == any(address in one for one in ranges)
