"""Bytes are counted where CUDAGraph Trees copy them, for the length of one block."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from optimizations import torch_internals
from suite.measure.copies import copies_of

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

    count = copies_of(replay)
    assert count.placeholder_tensors == len(moved) == 3
    bytes_moved = sum(tensor.numel() * tensor.element_size() for tensor in moved)
    assert count.placeholder_bytes == bytes_moved == 4 * 4 + 5 * 8
    assert copies_of(lambda: (replay(), replay())).placeholder_bytes == 2 * bytes_moved


def test_error_restores_the_stock_method():
    stock = NODE._copy_inputs_and_remove_from_src

    def failing() -> None:
        assert NODE._copy_inputs_and_remove_from_src is not stock
        raise RuntimeError

    with pytest.raises(RuntimeError):
        copies_of(failing)
    assert NODE._copy_inputs_and_remove_from_src is stock
