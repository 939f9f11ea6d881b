"""Count data bytes copied into the placeholders of CUDA graphs, by wrapping the method that copies them.

Stock CUDAGraph Trees copy every input that is neither static nor an output of another graph before each replay, in
`CUDAGraphNode._copy_inputs_and_remove_from_src`. This method is wrapped in `copies_of`, but never in timed iterations.

Graphs that read inputs in place use the same method for copied inputs. Encore reports the bytes of pointers that they
write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import optimizations
from optimizations import torch_internals
from suite.results.schema import Copies


def copied_bytes(tensor: torch.Tensor, expanded_dims: Sequence[int]) -> int:
    """Return the bytes that a copy of `tensor` moves: one element along each dimension that is expanded (stride 0)."""
    elements = 1
    for dimension, size in enumerate(tensor.shape):
        elements *= min(size, 1) if dimension in expanded_dims else size
    return elements * tensor.element_size()


def copies_of(run: Callable[[], object]) -> Copies:
    """Return the copies into placeholders of all replays while `run` runs, and the bytes of pointers instead."""
    target: Any = torch_internals.cudagraph_trees.CUDAGraphNode
    stock = target._copy_inputs_and_remove_from_src
    copied: list[int] = []

    def counted(graph: Any, destinations: list[Any], sources: list[Any]) -> None:
        for index in graph.non_static_input_idx:
            if isinstance(source := sources[index], torch.Tensor):
                copied.append(copied_bytes(source, graph.expanded_dims[index]))
        stock(graph, destinations, sources)

    before = pointer_bytes()
    with torch_internals.replaced_attribute(target, "_copy_inputs_and_remove_from_src", counted):
        run()
    pointers = pointer_bytes() - before
    return Copies(placeholder_bytes=sum(copied), placeholder_tensors=len(copied), pointer_bytes=pointers)


def pointer_bytes() -> int:
    """Return the bytes of pointers written so far, by all graphs that read inputs in place."""
    return sum(one.total_pointer_bytes for graph in optimizations.report() for one in graph.recordings)
