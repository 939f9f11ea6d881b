"""Count data bytes copied into the placeholders of CUDA graphs, by wrapping the method that copies them.

Stock CUDAGraph Trees copy every input that is neither static nor an output of another graph before each replay, in
`CUDAGraphNode._copy_inputs_and_remove_from_src`. This method is wrapped during a `counting` block, but never in timed
iterations.

Graphs that read inputs in place use the same method for copied inputs. Encore reports the bytes of pointers that they
write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import optimizations
from optimizations import torch_internals


@dataclass(slots=True)
class CopyCount:
    """Hold bytes and tensors copied so far. `pointer_bytes`: written instead of data."""

    copied_bytes: int = 0
    tensors: int = 0
    pointer_bytes: int = 0


def copied_bytes(tensor: torch.Tensor, expanded_dims: Sequence[int]) -> int:
    """Return the bytes that a copy of `tensor` moves: one element along each dimension that is expanded (stride 0)."""
    elements = 1
    for dimension, size in enumerate(tensor.shape):
        elements *= min(size, 1) if dimension in expanded_dims else size
    return elements * tensor.element_size()


@contextlib.contextmanager
def counting() -> Iterator[CopyCount]:
    """Count the copies into placeholders of all replays inside the block."""
    target: Any = torch_internals.cudagraph_trees.CUDAGraphNode
    stock = target._copy_inputs_and_remove_from_src
    count = CopyCount()

    def counted(graph: Any, destinations: list[Any], sources: list[Any]) -> None:
        for index in graph.non_static_input_idx:
            if isinstance(source := sources[index], torch.Tensor):
                count.copied_bytes += copied_bytes(source, graph.expanded_dims[index])
                count.tensors += 1
        stock(graph, destinations, sources)

    before = pointer_bytes()
    with torch_internals.replaced_attribute(target, "_copy_inputs_and_remove_from_src", counted):
        yield count
    count.pointer_bytes += pointer_bytes() - before


def pointer_bytes() -> int:
    """Return the bytes of pointers written so far, by all graphs that read inputs in place."""
    return sum(recording.total_pointer_bytes for recording in optimizations.recordings())
