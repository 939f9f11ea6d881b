"""Capture a function once more, next to its recording, to compare the two graphs.

Such a capture is never launched. It has a memory pool of its own (`pools`), which is freed after the capture was read,
so its intermediates have other addresses than the recording's. The record includes the memory that each graph owns.

Note [What a second capture may touch]. The host runs the function once more, as in its warm-up. Its inputs must not own
memory: the function drops its inputs one after another. The random state is restored; the kernels read their random
offset from the generator's captured state, which all graphs of one generator share. While a capture draws random
numbers, no other thread can use PyTorch's generator, so such a capture requires that no other thread runs. Other
captures do not involve the generator.

Note [Whose workspace a second capture has]. It must be in the capture's own memory, or its address would count as an
input's. Stock frees all workspaces of cuBLAS before each recording for a similar reason. That is done here too, unless
the program has a memory pool: a graph that it captured by hand since stock's last recording may write to an older
workspace, and would then write to a tensor that gets its memory. In this case the capture uses a stream of its own,
for which cuBLAS has no workspace yet. The workspace allocated there, in the pool of the first such capture, stays until
stock records again, and counts as memory of every such capture.

A capture reads no data, so its inputs may overlap: all share one buffer that is slightly longer than the largest input.

Note [Displacements]. All inputs move by different distances; otherwise their addresses could not be distinguished. All
distances are odd multiples of `GRANULE_BYTES`: the difference of two addresses changes by an even multiple, so it never
looks like an address. Each address has the alignment of the recording's up to `GRANULE_BYTES`, because libraries choose
kernels by alignment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.graph.driver import CudaCallFailed, check
from optimizations.graph.pools import (
    end_failed_capture,
    failed_in_cusolver,
    in_order,
    others_have_pools,
    own_stream,
    pool_memory,
    scratch_pool,
)
from optimizations.graph.read import read_graph
from optimizations.graph.records import CapturedGraph, MemoryRange
from optimizations.uncollected import uncollected

GRANULE_BYTES = 512
"""The alignment of PyTorch's allocator."""


def displace(memory: Mapping[int, MemoryRange], start: int) -> dict[int, int]:
    """Return new offsets for inputs with this `memory` (by input) in a buffer that begins at address `start`.

    Offsets are in bytes. `start` is a multiple of `GRANULE_BYTES`. Note [Displacements].
    """
    offsets: dict[int, int] = {}
    taken: set[int] = set()
    granule = 0
    for index, where in sorted(memory.items()):
        residue = where.address % GRANULE_BYTES
        while True:
            offset = granule * GRANULE_BYTES + residue
            distance = start + offset - where.address
            granule += 1
            if (distance // GRANULE_BYTES) % 2 and distance not in taken:
                break
        taken.add(distance)
        offsets[index] = offset
    return offsets


def buffer_bytes(memory: Mapping[int, MemoryRange]) -> int:
    """Return an upper bound, in bytes, of the buffer that `displace` needs."""
    largest = max((one.size_bytes for one in memory.values()), default=0)
    # Parity and repeated distances skip offsets: each input skips at most as many as there are inputs.
    return largest + (4 * len(memory) + 4) * GRANULE_BYTES


@dataclass(frozen=True, slots=True)
class Recaptured:
    """Hold a capture's graph, and the memory of its own pool."""

    graph: CapturedGraph
    owned: tuple[MemoryRange, ...]


def recapture(
    model: Callable[[list[Any]], Any],
    inputs: Iterable[Any],
    *,
    random: bool,
    device: int,
    stream: torch.cuda.Stream,
    driver: Any,
) -> Recaptured:
    """Capture `model(inputs)` on `stream` and read it. See the Notes above.

    `random`: the function draws random numbers. If the program has a memory pool, another stream replaces `stream`.

    Raises:
        torch.OutOfMemoryError: there is no memory for a second set of intermediates.
        CudaCallFailed: the graph cannot be read.
    """
    arguments = list(inputs)
    with (
        torch.cuda.device(device),
        scratch_pool(device) as pool,
        uncollected(),
        _own_workspace(device, stream, pool) as (used, workspaces),
        in_order(used) if random else contextlib.nullcontext(),  # only such a capture enqueues something
        torch.cuda.stream(used),
    ):
        if random:
            found = _captured_by_torch(model, arguments, pool, device, driver)
        else:
            found = _captured_by_driver(model, arguments, pool, device, used, driver)
        return replace(found, owned=(*found.owned, *(one for other in workspaces for one in pool_memory(other))))


_apart: dict[int, tuple[torch.cuda.Stream, list[Any]]] = {}
"""For each device: a stream for second captures, and pools that may contain its cuBLAS workspaces."""


@contextlib.contextmanager
def _own_workspace(device: int, stream: torch.cuda.Stream, pool: Any) -> Iterator[tuple[torch.cuda.Stream, list[Any]]]:
    """Yield the stream to capture on into `pool`, and the pools with its workspaces. Note [Whose workspace ...]."""
    if not others_have_pools():
        with torch_internals.cudagraph_trees.clear_cublas_manager():
            yield stream, []
        return
    if device not in _apart:
        _apart[device] = own_stream(device), []
    own, pools = _apart[device]
    pools[:] = [one for one in pools if pool_memory(one)]
    try:
        yield own, list(pools)
    finally:
        pools.append(pool)


def _captured_by_driver(
    model: Callable[[list[Any]], Any], arguments: list[Any], pool: Any, device: int, stream: Any, driver: Any
) -> Recaptured:
    """Capture without PyTorch's generator, which other threads may be using."""
    raw = driver.CUstream(stream.cuda_stream)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    torch_internals.begin_allocating(device, pool)
    try:
        try:
            check(driver.cuStreamBeginCapture, raw, mode)
            outputs = model(arguments)
            del outputs
        except BaseException:  # an interrupt may come right after the call that begins it
            with contextlib.suppress(CudaCallFailed):  # it did not begin, or the failure has ended it
                check(driver.cuGraphDestroy, check(driver.cuStreamEndCapture, raw))
            raise
        graph = check(driver.cuStreamEndCapture, raw)
        try:
            return Recaptured(read_graph(driver, graph), pool_memory(pool))
        finally:
            check(driver.cuGraphDestroy, graph)
    finally:
        torch_internals.end_allocating(device, pool)
        torch_internals.release_pool(device, pool)


def _captured_by_torch(
    model: Callable[[list[Any]], Any], arguments: list[Any], pool: Any, device: int, driver: Any
) -> Recaptured:
    """Capture a function that may draw random numbers. No other thread may draw any meanwhile."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    register_generators(graph, arguments, device)
    try:
        with torch_internals.dynamo_utils.preserve_rng_state():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                outputs = model(arguments)
                del outputs
            finally:
                graph.capture_end()
        return Recaptured(read_graph(driver, driver.CUgraph(graph.raw_cuda_graph())), pool_memory(pool))
    except BaseException as error:
        in_cusolver = failed_in_cusolver(error)
        end_failed_capture(device, pool, torch.cuda.current_stream(), in_cusolver=in_cusolver)
        raise
    finally:
        graph.reset()


def register_generators(graph: torch.cuda.CUDAGraph, inputs: Iterable[Any], device: int) -> None:
    """Make replays of `graph` advance the generators among `inputs`. Call it before the capture."""
    generators = [one for one in inputs if isinstance(one, torch.Generator)]
    with torch.cuda.device(device) if generators else contextlib.nullcontext():
        for generator in generators:
            graph.register_generator_state(generator)
