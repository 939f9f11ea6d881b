"""Copies of kept results that are laid out once: which there are, and what is in the list then."""

from __future__ import annotations

import pytest
import torch

from optimizations.trees.copies_out import MANY_COPIES, copies_out


@pytest.mark.parametrize("count", [1, 2, MANY_COPIES, MANY_COPIES + 1])
def test_what_is_kept_is_copied_and_nothing_else(count: int) -> None:
    results = [torch.full((2, 3), float(place)).t() for place in range(count + 2)]
    kept = set(range(1, count + 1))
    copies = copies_out(results, kept, range(count + 2))
    assert (copies.count, copies.bytes) == (count, 24 * count)
    for start in (0.0, 100.0):  # laid out once, for the results of any call
        given = [torch.full((2, 3), start + place).t() for place in range(count + 2)]
        handed = list(given)
        assert copies.make is not None
        copies.make(handed)
        for place, (one, other) in enumerate(zip(handed, given, strict=True)):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
            assert (one.data_ptr() == other.data_ptr()) is (place not in kept)


@pytest.mark.parametrize("kept", [{1}, {0, 1}])
def test_what_shares_memory_or_has_gaps_is_not_copied_here(kept: set[int]) -> None:
    copies = copies_out([torch.ones(2), torch.ones(2)], kept, {0})
    assert (copies.count, copies.make) == (len(kept), None)


@pytest.mark.parametrize("count", [1, 3, MANY_COPIES])
def test_where_memory_is_short_the_list_stays_as_it_is(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [torch.ones(2) for _ in range(count)]
    copies = copies_out(results, range(count), range(count))
    made: list[torch.Tensor] = []

    def short(tensor: torch.Tensor) -> torch.Tensor:
        if len(made) == count - 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made.append(torch.zeros(2))
        return made[-1]

    monkeypatch.setattr(torch.Tensor, "clone", short)
    monkeypatch.setattr(torch, "empty_like", short)
    handed = list(results)
    assert copies.make is not None
    with pytest.raises(torch.OutOfMemoryError):
        copies.make(handed)
    assert all(one is other for one, other in zip(handed, results, strict=True))
