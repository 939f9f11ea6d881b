"""Captures a function once more, next to its recording, to compare the two graphs.

Nothing of such a capture is ever run. It has a memory pool of its own (`pools`), which goes when the capture has been
read, so its intermediates lie at other addresses than the recording's. Which memory each graph owns is part of the
record.

Note [What a second capture may touch]. The function is run once more by the host, as in its warm-up. Its inputs must
not own memory: the function drops its inputs one after another. The random state is put back; the kernels' random
numbers come from where the generator's captured state lies, which all graphs of one generator share. While a capture
draws random numbers, nobody else can use PyTorch's generator, so such a capture is made only where no other thread
runs. Other captures do not involve the generator.

Note [No collection while capturing]. A graph that is collected as garbage frees memory by calls that end the capture of
whoever is capturing. So nothing is collected during one.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.captured.driver import check
from optimizations.captured.graph import CapturedGraph, MemoryRange
from optimizations.captured.pools import end_failed_capture, pool_memory, scratch_pool
from optimizations.captured.read import read_graph


@dataclass(frozen=True, slots=True)
class Recaptured:
    """A capture's graph, and the memory of its own pool."""

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
    """Capture `model(inputs)` on `stream` and read it. Notes [What a second capture may touch], [No collection ...].

    `random`: the function draws random numbers.

    Raises:
        torch.OutOfMemoryError: there is no memory for a second set of intermediates.
        CudaCallFailed: the graph cannot be read.
    """
    arguments = list(inputs)
    with (
        torch.cuda.device(device),
        scratch_pool(device) as pool,
        uncollected(),
        torch_internals.cudagraph_trees.clear_cublas_manager(),
        torch.cuda.stream(stream),
    ):
        stream.wait_stream(torch.cuda.current_stream(device))
        if random:
            return _captured_by_torch(model, arguments, pool, device, driver)
        return _captured_by_driver(model, arguments, pool, device, stream, driver)


def _captured_by_driver(
    model: Callable[[list[Any]], Any], arguments: list[Any], pool: Any, device: int, stream: Any, driver: Any
) -> Recaptured:
    """A capture that PyTorch's generator, which other threads may be using, hears nothing of."""
    raw = driver.CUstream(stream.cuda_stream)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    torch_internals.begin_allocating(device, pool)
    try:
        check(driver.cuStreamBeginCapture, raw, mode)
        try:
            outputs = model(arguments)
            del outputs
        finally:
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
    """A capture that may draw random numbers. Nobody else may draw any meanwhile."""
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
    except BaseException:
        end_failed_capture(device, pool, torch.cuda.current_stream())
        raise
    finally:
        graph.reset()


def register_generators(graph: torch.cuda.CUDAGraph, inputs: Iterable[Any], device: int) -> None:
    """Let replays of `graph` advance the generators among `inputs`; to be called before the capture."""
    with torch.cuda.device(device):
        for generator in inputs:
            if isinstance(generator, torch.Generator):
                graph.register_generator_state(generator)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage inside the block. Note [No collection while capturing]."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
