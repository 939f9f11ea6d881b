"""Copies of kept results that are laid out once: which there are, and what is in the list then."""

from __future__ import annotations

import pytest
import torch

from optimizations.trees.copies_out import MANY_COPIES, copies_out


def pool_of(results: list[torch.Tensor]) -> set[int]:
    """As if these results lay in graph memory."""
    return {one.untyped_storage().data_ptr() for one in results}


@pytest.mark.parametrize("count", [1, 2, MANY_COPIES, MANY_COPIES + 1])
def test_what_is_kept_is_copied_and_nothing_else(count: int) -> None:
    results = [torch.full((2, 3), float(place)).t() for place in range(count + 2)]
    kept = set(range(1, count + 1))
    copies = copies_out(results, kept, pool_of(results))
    assert (copies.count, copies.bytes) == (count, 24 * count)
    for start in (0.0, 100.0):  # laid out once, for the results of any call
        given = [torch.full((2, 3), start + place).t() for place in range(count + 2)]
        handed = list(given)
        copies.make(handed)
        for place, (one, other) in enumerate(zip(handed, given, strict=True)):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
            assert (one.data_ptr() == other.data_ptr()) is (place not in kept)


@pytest.mark.parametrize("kept", [{0}, {1}, {0, 1, 2}])
def test_results_that_share_memory_share_a_copy(kept: set[int]) -> None:
    def returned(start: float) -> list[torch.Tensor]:
        whole = torch.arange(6.0) + start
        view = whole[2:4]
        return [whole, view, view, torch.full((2,), start)]

    results = returned(0.0)
    copies = copies_out(results, kept, pool_of(results))
    assert (copies.count, copies.bytes) == (1, 24)
    for start in (10.0, 20.0):
        given = returned(start)
        handed = list(given)
        copies.make(handed)
        assert [one.tolist() for one in handed] == [one.tolist() for one in given]
        assert handed[1] is handed[2]
        assert handed[0].untyped_storage().data_ptr() == handed[1].untyped_storage().data_ptr()
        assert handed[0].data_ptr() != given[0].data_ptr()
        assert handed[3] is given[3]


def test_a_result_with_gaps_is_copied_with_its_whole_memory() -> None:
    results = [torch.arange(8.0)[::2]]
    copies = copies_out(results, {0}, pool_of(results))
    handed = [(torch.arange(8.0) + 3)[::2]]
    copies.make(handed)
    assert handed[0].tolist() == [3, 5, 7, 9]
    assert handed[0].stride() == (2,)


def test_a_result_outside_of_graph_memory_is_not_copied() -> None:
    results = [torch.ones(2), torch.ones(2)]
    copies = copies_out(results, {0, 1}, pool_of(results[:1]))
    handed = list(results)
    copies.make(handed)
    assert (copies.count, handed[0] is results[0], handed[1] is results[1]) == (1, False, True)


@pytest.mark.parametrize("count", [1, 3, MANY_COPIES])
def test_where_memory_is_short_the_list_stays_as_it_is(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [torch.ones(2) for _ in range(count)]
    copies = copies_out(results, range(count), pool_of(results))
    made: list[torch.Tensor] = []

    def short(tensor: torch.Tensor) -> torch.Tensor:
        if len(made) == count - 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made.append(torch.zeros(2))
        return made[-1]

    monkeypatch.setattr(torch.Tensor, "clone", short)
    monkeypatch.setattr(torch, "empty_like", short)
    handed = list(results)
    with pytest.raises(torch.OutOfMemoryError):
        copies.make(handed)
    assert all(one is other for one, other in zip(handed, results, strict=True))
