"""Bytes are counted where CUDAGraph Trees copy them, for the length of one block."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from optimizations import torch_internals
from suite.measure.copies import copied_bytes, counting


class FakeNode:
    """The two fields the stock method reads, and a stock method that copies."""

    def __init__(self, non_static_input_idx, expanded_dims) -> None:
        self.non_static_input_idx = non_static_input_idx
        self.expanded_dims = expanded_dims
        self.calls = 0

    def _copy_inputs_and_remove_from_src(self, destinations, sources) -> None:
        self.calls += 1
        for index in self.non_static_input_idx:
            if isinstance(sources[index], torch.Tensor):
                destinations[index].copy_(sources[index])
                sources[index] = None


def replay(node: FakeNode, *sources: object) -> list[object]:
    destinations = [torch.zeros_like(source) if isinstance(source, torch.Tensor) else source for source in sources]
    node._copy_inputs_and_remove_from_src(destinations, list(sources))
    return destinations


def test_inputs_that_are_not_static_are_counted_and_still_copied():
    node = FakeNode([0, 2, 3], [[], [], [], []])
    data, ids = torch.randn(4, 8), torch.arange(5)
    with counting(FakeNode) as count:
        copied = replay(node, data, torch.randn(1000), ids, 7)
    assert (count.copied_bytes, count.tensors) == (4 * 8 * 4 + 5 * 8, 2)
    assert node.calls == 1
    torch.testing.assert_close(copied[0], data)


def test_replays_are_counted_inside_the_block_only():
    first, second = FakeNode([0], [[]]), FakeNode([0], [[]])
    with counting(FakeNode) as count:
        replay(first, torch.ones(2))
        replay(second, torch.ones(3, dtype=torch.bfloat16))
    replay(first, torch.ones(100))
    assert (count.copied_bytes, count.tensors) == (2 * 4 + 3 * 2, 2)


def test_error_restores_the_stock_method():
    stock = FakeNode._copy_inputs_and_remove_from_src
    with pytest.raises(RuntimeError), counting(FakeNode):
        assert FakeNode._copy_inputs_and_remove_from_src is not stock
        raise RuntimeError
    assert FakeNode._copy_inputs_and_remove_from_src is stock


def test_expanded_dimensions_move_one_element():
    assert copied_bytes(torch.randn(6, 1).expand(6, 50), [1]) == 6 * 4
    assert copied_bytes(torch.randn(6, 50), []) == 6 * 50 * 4
    assert copied_bytes(torch.randn(0, 50), [1]) == 0


def test_count_equals_tensors_copied_by_stock(monkeypatch):
    """The real method of CUDAGraph Trees, on CPU tensors: what it copies is what is counted."""
    moved: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, sources: moved.extend(sources))
    trees = torch_internals.cudagraph_trees
    node = SimpleNamespace(non_static_input_idx=[1, 2], expanded_dims=[[], [0], []])
    sources = [torch.randn(9), torch.randn(1, 4).expand(3, 4), torch.randn(5, dtype=torch.float64)]
    destinations = [torch.empty_strided(source.shape, source.stride(), dtype=source.dtype) for source in sources]
    with counting() as count:
        trees.CUDAGraphNode._copy_inputs_and_remove_from_src(node, destinations, list(sources))
    assert count.tensors == len(moved) == 2
    assert count.copied_bytes == sum(tensor.numel() * tensor.element_size() for tensor in moved) == 4 * 4 + 5 * 8
