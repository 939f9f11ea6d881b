"""Provide the CUDA functions that captures of steps and callables use. Tests replace it by a simulated device."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.calls.turns import make_context_current, wait_for_stream
from optimizations.capture.inputs import is_plain
from optimizations.capture.side_stream import SideStreams
from optimizations.concurrency.branches import Branches
from optimizations.concurrency.launch_log import LaunchLog, allocated_bytes
from optimizations.graph.memory import MemoryRanges
from optimizations.graph.pools import (
    end_failed_capture,
    failed_in_cusolver,
    in_order,
    new_pool,
    pool_memory,
    used_memory,
)
from optimizations.graph.read import captured_nodes, read_graph
from optimizations.graph.records import CapturedGraph, MemoryRange, OtherNode, addresses_between
from optimizations.race import Race, mark
from optimizations.trees.hook import at_rest
from optimizations.uncollected import uncollected


class Device:
    """Use a CUDA device. All captures use one side stream, so that they can share pools. See `side_stream`.

    Tests use a simulated device, which derives from this class and overrides all methods.

    Note [Calls on several streams]. In eager, independent calls on two streams need not wait for each other. Launches
    share placeholders and the memory pool, so each waits for the previous one. While the program captures the current
    stream, nothing can be launched. The first call in a thread may find no current context, which driver calls need.
    """

    has_own_random = True
    """True if its random numbers come from a different generator than the CPU's."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.streams = SideStreams(index)
        self._launched_on: int | None = None
        self._entered = threading.local()

    def follow(self) -> bool:
        """Let the current stream wait for the stream of the previous launch, if that is a different one.

        Call this before a launch. Return False if the program captures the current stream: no graph can be launched.
        Note [Calls on several streams].
        """
        if not hasattr(self._entered, "yes"):
            make_context_current(self.index)
            self._entered.yes = True
        if torch.cuda.is_current_stream_capturing():
            return False
        if (stream := torch_internals.current_raw_stream(self.index)) != self._launched_on:
            with torch.cuda.device(self.index):  # the current device may be a different one
                if torch.cuda.is_current_stream_capturing():
                    return False
                if self._launched_on is not None:
                    wait_for_stream(self._launched_on, self.index)
            self._launched_on = stream
        return True

    def is_on_other_stream(self) -> bool:
        """Return whether the current stream differs from that of the last launch for which `follow` was called."""
        return self._launched_on not in (None, torch_internals.current_raw_stream(self.index))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on the device."""
        return tensor.device.type == "cuda"

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Run the block on the side stream of captures, ordered with the current stream before and after."""
        with contextlib.suppress(RuntimeError):  # the call runs in any case; `ready` raises this before a capture
            self.streams.ready()
        stream = self.streams.current
        with torch.cuda.device(self.index), at_rest():
            outside = torch.cuda.current_stream()
            self.streams.last.follow()
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                outside.wait_stream(stream)

    def may_read(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Record for the allocator that the current stream may read these tensors.

        If they are freed, a thread that uses the stream on which they were made gets their memory after these reads.
        """
        stream = torch.cuda.current_stream(self.index)
        for tensor in tensors:
            if is_plain(tensor) and self.holds(tensor):
                tensor.data.record_stream(stream)

    def new_pool(self) -> Any:
        """Return a new memory pool for captures."""
        return new_pool()

    def pool_bytes(self, pool: Any) -> int:
        """Return the bytes of memory that a pool holds."""
        return sum(memory.size_bytes for memory in pool_memory(pool))

    def free_bytes(self) -> int | None:
        """Return the memory that an uncaptured call may allocate; None if unknown."""
        with self.here():
            free, _ = torch.cuda.mem_get_info()
            return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def new_graph(self) -> Any:
        """Return a new graph, to be captured."""
        return torch.cuda.CUDAGraph(keep_graph=True)

    @contextlib.contextmanager
    def capturing(self, graph: Any, pool: Any) -> Iterator[None]:
        """Capture the block; its work of the GPU is not executed."""
        with torch.cuda.device(self.index), uncollected(), at_rest():
            outside, stream = torch.cuda.current_stream(), self.streams.current
            try:
                with (
                    in_order(stream),
                    torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
                ):
                    yield
                graph.instantiate()
            except BaseException as error:
                torch.cuda.set_stream(outside)
                end_failed_capture(self.index, pool, stream, in_cusolver=failed_in_cusolver(error))
                raise

    def make_room(self, size_bytes: int) -> None:
        """Reserve a free block of this size in the pool of the current capture, if there is enough memory."""
        if size_bytes:
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.UntypedStorage(size_bytes, device=torch.device("cuda", self.index))  # freed at once

    def mentions(self, graph: Any, memory: Sequence[MemoryRange]) -> bool:
        """Return whether a captured graph may hold an address in one of these ranges."""
        return bool(memory) and any_word_in(self.read(graph), memory)

    def read(self, graph: Any) -> CapturedGraph:
        """Return a captured graph as a record, nodes in the order in which they were captured."""
        from cuda.bindings import driver

        return read_graph(driver, driver.CUgraph(graph.raw_cuda_graph()))

    def launch_log(self, *, notes_memory: bool) -> LaunchLog:
        """Return a log of the launches of the next capture and, with `notes_memory`, of the memory they touch."""
        from cuda.bindings import driver

        count = functools.partial(captured_nodes, driver, driver.CUstream(self.streams.current.cuda_stream))
        allocated = functools.partial(allocated_bytes, self.index)
        return LaunchLog(count, None, allocated_bytes=allocated, notes_memory=notes_memory)

    def branches(self, graph: Any, log: LaunchLog) -> Branches:
        """Return the race of a captured graph's chain against branches."""
        from cuda.bindings import driver

        return Branches(log, graph, driver, Race, functools.partial(mark, self.index))

    def memory(self, pool: Any) -> tuple[list[MemoryRange], list[MemoryRange]]:
        """Return the memory that a pool holds, and what of it tensors use, both with the cuBLAS workspaces."""
        workspaces = self.streams.workspaces()
        return [*pool_memory(pool), *workspaces], [*used_memory(pool), *workspaces]

    def default_generator(self) -> torch.Generator:
        """Return the default random generator of the device."""
        return torch.cuda.default_generators[self.index]

    def give_back(self) -> None:
        """Free cached memory: a step that is replayed allocates only its results."""
        torch.cuda.empty_cache()

    def wait(self) -> None:
        """Wait until the device has done all its work."""
        torch.cuda.synchronize(self.index)

    def here(self) -> AbstractContextManager[Any]:
        """Make the device the current one in the block."""
        return torch.cuda.device(self.index)


def any_word_in(graph: CapturedGraph, memory: Sequence[MemoryRange]) -> bool:
    """Return whether a word of a kernel's parameters, or an end of a copy or fill, is an address in the ranges.

    A word may begin at every fourth byte. A number that equals such an address counts as one, and so does a graph
    inside of the graph, which is not read.
    """
    if any(isinstance(node, OtherNode) and node.type_name == "GRAPH" for node in graph.nodes):
        return True
    ranges = MemoryRanges(memory)
    low, *_, high = ranges.borders or (0, 0)
    return any(word in ranges for words in addresses_between(graph.nodes, low, high) for word in words)
