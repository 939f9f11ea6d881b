"""Inputs of a second capture get distinguishable distances and the first ones' alignment in little memory."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from optimizations.graph.memory import each_once, memory_of, overlaps, size_bytes
from optimizations.graph.recapture import GRANULE_BYTES, buffer_bytes, displace
from optimizations.graph.records import MemoryRange

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
