"""Captures a function once more, beside its recording, to compare the two graphs.

Nothing of such a capture is ever run. It has a memory pool of its own, which goes when the capture has been read, so
its intermediates lie at other addresses than the recording's; which memory each graph owns is part of the record.

Note [What a second capture may touch]. The function is run once more by the host, as in its warm-up. Its inputs must
not own memory of the recording's pool: the function drops its inputs one after another, and memory freed here would be
free in the recording too. The random state is put back; the kernels' random numbers come from where the generator's
captured state lies, which all graphs of one generator share.

Note [No collection while capturing]. A graph that is collected as garbage frees memory by calls that end the capture of
whoever is capturing. So garbage is collected before, and not during.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.captured.graph import CapturedGraph, MemoryRange
from optimizations.captured.read import read_graph


@dataclass(frozen=True, slots=True)
class Recaptured:
    """A capture's graph, the memory of its own pool, and where the storages of its outputs began."""

    graph: CapturedGraph
    owned: tuple[MemoryRange, ...]
    output_storages: frozenset[int]


def recapture(
    model: Callable[[list[Any]], Any], inputs: Iterable[Any], *, device: int, stream: torch.cuda.Stream, driver: Any
) -> Recaptured:
    """Capture `model(inputs)` on `stream` and read it. Notes [What a second capture may touch], [No collection ...].

    Raises:
        torch.OutOfMemoryError: there is no memory for a second set of intermediates.
        CudaCallFailed: the graph cannot be read.
    """
    trees = torch_internals.cudagraph_trees
    arguments = list(inputs)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    register_generators(graph, arguments, device)
    with (
        uncollected(),
        torch_internals.dynamo_utils.preserve_rng_state(),
        torch.cuda.device(device),
        trees.clear_cublas_manager(),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        outputs = model(arguments)
    try:
        return Recaptured(
            read_graph(driver, driver.CUgraph(graph.raw_cuda_graph())),
            pool_memory(graph.pool()),
            storages(outputs),
        )
    finally:
        del outputs
        graph.reset()


def register_generators(graph: torch.cuda.CUDAGraph, inputs: Iterable[Any], device: int) -> None:
    """Let replays of `graph` advance the generators among `inputs`; to be called before the capture."""
    with torch.cuda.device(device):
        for generator in inputs:
            if isinstance(generator, torch.Generator):
                graph.register_generator_state(generator)


def storages(outputs: Any) -> frozenset[int]:
    """Addresses of the storages of the tensors among what a function returned, empty ones left out."""
    values = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors) - {0}


def pool_memory(pool: Any) -> tuple[MemoryRange, ...]:
    """The segments of a memory pool, ascending, those that adjoin joined."""
    segments = torch_internals.cudagraph_trees.get_cudagraph_segments(tuple(pool))
    return joined((segment["address"], segment["total_size"]) for segment in segments)


def joined(segments: Iterable[tuple[int, int]]) -> tuple[MemoryRange, ...]:
    """(address, size in bytes) pairs as ranges, ascending, those that adjoin joined."""
    ranges: list[list[int]] = []
    for address, size in sorted(segments):
        if ranges and sum(ranges[-1]) == address:
            ranges[-1][1] += size
        else:
            ranges.append([address, size])
    return tuple(MemoryRange(address=address, size_bytes=size) for address, size in ranges)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect garbage now, and not inside the block. Note [No collection while capturing]."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
