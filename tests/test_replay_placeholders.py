"""Placeholders outside of the pool: two places of the right shape, apart by a distance of their own, and poison."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimizations.captured.placeholders import GRANULE_BYTES, data_of, outside_placeholders, poison, size_bytes
from optimizations.captured.recapture import joined

TENSORS = {
    "dense": torch.arange(24.0).reshape(4, 6),
    "with gaps": torch.arange(24.0).reshape(4, 6)[:, ::2],
    "offset": torch.arange(24.0)[5:],
    "transposed": torch.arange(24).reshape(4, 6).t(),
    "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 5),
    "scalar": torch.tensor(3.5),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, 3 - 1j]),
    "bfloat16": torch.arange(5.0).bfloat16(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_filled_placeholder_holds_the_input(name: str) -> None:
    like = TENSORS[name]
    placeholder = outside_placeholders({4: like})[4]
    assert placeholder.tensor.stride() == placeholder.shifted.stride() == like.stride()
    placeholder.fill(like)
    assert torch.equal(placeholder.tensor, like)
    assert placeholder.tensor.untyped_storage().data_ptr() == placeholder.tensor.data_ptr(), "stock keeps no offset"
    assert placeholder.memory.size_bytes == size_bytes(like) == data_of(like).numel()
    assert placeholder.shifted.untyped_storage().nbytes() >= GRANULE_BYTES + size_bytes(like)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20))
def test_every_placeholder_moves_by_a_distance_of_its_own(sizes: list[int]) -> None:
    made = outside_placeholders({index: torch.empty(size, dtype=torch.uint8) for index, size in enumerate(sizes)})
    moves = [one.shifted_memory.address - one.memory.address for one in made.values()]
    assert len(set(moves)) == len(sizes)
    assert all(move % GRANULE_BYTES == 0 and move > 0 for move in moves)
    differences = {abs(one - other) for one in moves for other in moves}
    assert not differences & set(moves), "a difference of two addresses is not taken for an address"
    for one in made.values():
        end = one.shifted_memory.address + one.shifted_memory.size_bytes
        assert end <= one.buffer.data_ptr() + one.buffer.numel()


def test_an_empty_tensor_has_no_bytes() -> None:
    assert size_bytes(torch.empty(0, 5)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_poison_is_no_number(dtype: torch.dtype) -> None:
    poisoned = poison(data_of(torch.ones(4).to(dtype)), dtype).view(dtype).float()
    assert all(map(math.isnan, poisoned.tolist()))


def test_poison_of_indices_is_an_index_and_of_booleans_the_opposite() -> None:
    assert poison(data_of(torch.tensor([5, 9])), torch.int64).view(torch.int64).tolist() == [0, 0]
    flags = torch.tensor([True, False])
    assert poison(data_of(flags), torch.bool).view(torch.bool).tolist() == [False, True]
    assert torch.equal(flags, torch.tensor([True, False]))


def test_segments_that_adjoin_are_joined() -> None:
    ranges = joined([(4096, 512), (0, 1024), (1024, 1024), (8192, 1)])
    assert [(one.address, one.size_bytes) for one in ranges] == [(0, 2048), (4096, 512), (8192, 1)]
    assert joined([]) == ()
