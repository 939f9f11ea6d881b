"""Bytes are counted where CUDAGraph Trees copy them, for the length of one block."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from optimizations import torch_internals
from suite.measure.copies import counting

NODE = torch_internals.cudagraph_trees.CUDAGraphNode


def test_count_equals_tensors_copied_by_stock(monkeypatch):
    """The real method of CUDAGraph Trees, on CPU tensors: what it copies is what is counted."""
    moved: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, sources: moved.extend(sources))
    node = SimpleNamespace(non_static_input_idx=[1, 2, 3, 4], expanded_dims=[[], [0], [], [], [1]])
    sources = [torch.randn(9), torch.randn(1, 4).expand(3, 4), torch.randn(5, dtype=torch.float64), 7]
    sources.append(torch.randn(0, 50))

    def replay() -> None:
        destinations = [torch.empty_like(one) if isinstance(one, torch.Tensor) else one for one in sources]
        NODE._copy_inputs_and_remove_from_src(node, destinations, list(sources))

    with counting() as count:
        replay()
    assert count.tensors == len(moved) == 3
    assert count.copied_bytes == sum(tensor.numel() * tensor.element_size() for tensor in moved) == 4 * 4 + 5 * 8
    replay()
    assert count.tensors == 3, "only what is copied inside of the block"
    with counting() as count:
        replay()
        replay()
    assert (count.tensors, count.copied_bytes) == (6, 2 * (4 * 4 + 5 * 8))


def test_error_restores_the_stock_method():
    stock = NODE._copy_inputs_and_remove_from_src
    with pytest.raises(RuntimeError), counting():
        assert NODE._copy_inputs_and_remove_from_src is not stock
        raise RuntimeError
    assert NODE._copy_inputs_and_remove_from_src is stock
