"""Provide what captures of steps and callables need of CUDA, so thin that tests can put another one in its place."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.calls.turns import make_context_current, stream_of, wait_for_stream
from optimizations.capture.side_stream import SideStreams
from optimizations.concurrency.branches import Branches, Noted
from optimizations.concurrency.launch_log import LaunchLog
from optimizations.graph.editing import EditableGraph
from optimizations.graph.host import HostUpdates, node_update
from optimizations.graph.memory import MemoryRanges
from optimizations.graph.plan import Choice, Plan
from optimizations.graph.pools import (
    end_failed_capture,
    failed_in_cusolver,
    in_order,
    new_pool,
    pool_memory,
    used_memory,
)
from optimizations.graph.read import captured_nodes, read_graph
from optimizations.graph.records import CapturedGraph, MemoryRange, words_of
from optimizations.in_place.addresses import Pointers
from optimizations.race import Race, mark
from optimizations.trees.hook import at_rest
from optimizations.uncollected import uncollected


class Device:
    """Use a CUDA device. One side stream serves all captures, so that their pools can share memory. See `side_stream`.

    Tests put a simulated one in its place, which derives from this class and overrides all of it.

    Note [Calls on several streams]. In eager, calls on two streams need not wait for each other where they share
    nothing. Launches share what they are copied from and to, and what they compute in, so each waits for the one
    before. Where the program captures, nothing can be launched; it may do so on the stream that calls were on. And a
    thread that calls for the first time may have no context yet, which calls of the driver need.
    """

    has_own_random = True
    """True if its random numbers come from another generator than the CPU's."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._streams = SideStreams(index)
        self._launched_on: int | None = None
        self._entered = threading.local()

    def follow(self) -> bool:
        """Let the current stream wait for what the stream of the launch before was given, if that is another.

        To be called before a launch. Return False where the program captures it: no graph can be launched there.
        """
        if not hasattr(self._entered, "yes"):
            make_context_current(self.index)
            self._entered.yes = True
        if torch.cuda.is_current_stream_capturing():
            return False
        stream = torch_internals.current_raw_stream(self.index)
        return stream == self._launched_on or self._follow(stream)

    @property
    def launched_on(self) -> int | None:
        """Return the stream of the last launch for which `follow` was called."""
        return self._launched_on

    def wait_for(self, stream: int) -> None:
        """Let what the current stream is given next wait for what another stream was given."""
        wait_for_stream(stream, self.index)

    def hold(self, stream: int) -> None:
        """Let what another stream is given next wait for what the current stream was given."""
        current = torch_internals.current_raw_stream(self.index)
        with torch.cuda.stream(stream_of(stream, self.index)):
            wait_for_stream(current, self.index)

    def _follow(self, stream: int) -> bool:
        """Wait for the last launch. Note [Calls on several streams]. The current device may be another one."""
        with torch.cuda.device(self.index):
            if torch.cuda.is_current_stream_capturing():
                return False
            if self._launched_on is not None:
                wait_for_stream(self._launched_on, self.index)
        self._launched_on = stream
        return True

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self._streams.current

    def ready(self) -> bool:
        """Make the side stream ready, before a capture. Return False where it had to become another one, on which
        nothing was warmed up."""
        return self._streams.ready()

    def keeps_workspace(self) -> bool:
        """Return whether a product of matrices that runs now computes in memory that is kept for graphs.

        Now is in this thread and on the current stream.
        """
        return self._streams.keeps_workspace()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's memory is the device's."""
        return tensor.device.type == "cuda"

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Run the block on the side stream of captures, after and before what the current stream does."""
        with contextlib.suppress(RuntimeError):  # the call is made all the same: `ready` raises it before a capture
            self._streams.ready()
        stream = self._stream
        with torch.cuda.device(self.index), at_rest():
            outside = torch.cuda.current_stream()
            self._streams.follow()
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                outside.wait_stream(stream)

    def may_read(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Note that what the current stream is given next may read these. Where they are freed meanwhile, another
        thread gets their memory, on the stream that they were made on, when that is done."""
        stream = torch.cuda.current_stream(self.index)
        for tensor in tensors:
            if type(tensor) is torch.Tensor and tensor.layout is torch.strided and self.holds(tensor):
                tensor.data.record_stream(stream)

    def new_pool(self) -> Any:
        """Return a new memory pool for captures."""
        return new_pool()

    def pool_bytes(self, pool: Any) -> int:
        """Return the bytes of memory that a pool holds."""
        return sum(memory.size_bytes for memory in pool_memory(pool))

    def free_bytes(self) -> int | None:
        """Return how much memory a call that runs uncaptured may take; None if that is not known."""
        with self.here():
            free, _ = torch.cuda.mem_get_info()
            return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def new_graph(self) -> Any:
        """Return a new graph, to be captured."""
        return torch.cuda.CUDAGraph(keep_graph=True)

    @contextlib.contextmanager
    def capturing(self, graph: Any, pool: Any, generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
        """Capture what runs in the block; nothing of it is executed."""
        with torch.cuda.device(self.index), uncollected(), at_rest():
            outside = torch.cuda.current_stream()
            for generator in generators:
                graph.register_generator_state(generator)
            broken = True
            try:
                with (
                    in_order(self._stream),
                    torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
                ):
                    yield
                graph.instantiate()
                broken = False
            finally:
                torch.cuda.set_stream(outside)
                if broken:
                    in_cusolver = failed_in_cusolver(sys.exc_info()[1])
                    end_failed_capture(self.index, pool, self._stream, in_cusolver=in_cusolver)

    def make_room(self, size_bytes: int) -> None:
        """Let the pool of the current capture have so much free memory in one piece, if there is as much."""
        if size_bytes:
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.UntypedStorage(size_bytes, device=torch.device("cuda", self.index))  # which nothing fills

    def mentions(self, graph: Any, memory: Sequence[MemoryRange]) -> bool:
        """Return whether a captured graph may hold an address in one of these ranges."""
        return bool(memory) and any_word_in(self.read(graph), memory)

    def node_count(self) -> int:
        """Return how many nodes the graph has that is being captured."""
        from cuda.bindings import driver

        return captured_nodes(driver, driver.CUstream(self._stream.cuda_stream))

    def read(self, graph: Any) -> CapturedGraph:
        """Return a captured graph as a record, nodes in the order in which they were captured."""
        from cuda.bindings import driver

        return read_graph(driver, driver.CUgraph(graph.raw_cuda_graph()))

    def renew(self, graph: Any, pointers: Pointers) -> None:
        """Let `pointers` set nodes of the executable that the graph has now, as they were set in the one before.

        Raises:
            CudaCallFailed: the driver does not take that.
        """
        from cuda.bindings import driver

        assert isinstance(pointers, HostUpdates)
        pointers.renew(driver.CUgraphExec(graph.raw_cuda_graph_exec()))

    def pointers(self, graph: Any, captured: CapturedGraph, plan: Plan) -> Pointers:
        """Return what sets the addresses of inputs in an instantiated graph, as planned."""
        from cuda.bindings import driver

        return host_pointers(driver, graph, captured, plan)

    def launch_log(self, *, notes_memory: bool) -> LaunchLog:
        """Return what notes the launches of a capture, and the memory they touch where asked."""

        def allocated() -> int:
            return int(torch.cuda.memory_stats_as_nested_dict(self.index)["allocated_bytes"]["all"]["allocated"])

        known = allocated if notes_memory else None
        return LaunchLog(self.node_count, None, allocated_bytes=known, in_autograd=True, notes_memory=notes_memory)

    def branches(self, graph: Any, noted: Noted) -> Branches:
        """Return the race of a captured graph's chain against branches."""
        from cuda.bindings import driver

        return Branches(noted, graph, driver, Race, functools.partial(mark, self.index))

    def workspace_ranges(self) -> Sequence[MemoryRange]:
        """Return where workspaces of cuBLAS lie that captures use."""
        return self._streams.workspaces()

    def pool_ranges(self, pool: Any) -> Sequence[MemoryRange]:
        """Return the memory that a pool holds."""
        return pool_memory(pool)

    def used_ranges(self, pool: Any) -> Sequence[MemoryRange]:
        """Return what of a pool's memory is some tensor's now."""
        return used_memory(pool)

    def default_generator(self) -> torch.Generator:
        """Return where the device's random numbers come from, if nothing else is said."""
        return torch.cuda.default_generators[self.index]

    def random_states(self) -> list[Any]:
        """Return states of the device's default generator, to be put back."""
        return [torch.cuda.get_rng_state(self.index)]

    def restore_random_states(self, states: list[Any]) -> None:
        # Setting even the same state makes the next recurrent layer of cuDNN draw its dropout from another seed.
        """Put them back."""
        if not torch.equal(states[0], torch.cuda.get_rng_state(self.index)):
            torch.cuda.set_rng_state(states[0], self.index)

    def give_back(self) -> None:
        """Return memory that nothing uses to the device: a step that is replayed allocates its results only."""
        torch.cuda.empty_cache()

    def wait(self) -> None:
        """Wait until the device has done all its work."""
        torch.cuda.synchronize(self.index)

    def here(self) -> AbstractContextManager[Any]:
        """Make the device the current one in the block."""
        return torch.cuda.device(self.index)


def host_pointers(driver: Any, graph: Any, captured: CapturedGraph, plan: Plan) -> HostUpdates:
    """Return what sets nodes of an instantiated `torch.cuda.CUDAGraph` from the host. `captured` was read from it.

    Raises:
        CudaCallFailed: a node cannot be read.
    """
    target = EditableGraph.of(driver, driver.CUgraph(graph.raw_cuda_graph()), captured)
    updates = [node_update(target, node, None) for node in plan.of(Choice.HOST)]  # no tensor map is among them
    return HostUpdates(updates, driver.CUgraphExec(graph.raw_cuda_graph_exec()))


def any_word_in(graph: CapturedGraph, memory: Sequence[MemoryRange]) -> bool:
    """Return whether a word of a kernel's parameters, or an end of a copy or fill, lies in one of the ranges.

    Every fourth byte may begin a word. A number that looks like such an address counts as one.
    """
    ranges = MemoryRanges(memory)
    return any(address in ranges for _, node in graph.walk() for address in words_of(node))
