"""Change a captured graph before it is instantiated, as node updaters do."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from optimizations.graph.driver import check
from optimizations.graph.read import node_handles
from optimizations.graph.records import WORD_BYTES, CapturedGraph


@dataclass(frozen=True, slots=True)
class EditableGraph:
    """Hold a `CUgraph`, its `CUgraphNode`s in the order of the nodes of `captured`, and the context it runs in."""

    driver: Any
    graph: Any
    handles: Sequence[Any]
    captured: CapturedGraph
    context: Any

    @classmethod
    def of(cls, driver: Any, graph: Any, captured: CapturedGraph) -> EditableGraph:
        """Return `graph` itself, which `captured` was read from, in the current context."""
        return cls(driver, graph, tuple(node_handles(driver, graph)), captured, check(driver.cuCtxGetCurrent))

    def add_kernel(self, function: Any, blocks: int, threads: int, arguments: LaunchParameters) -> tuple[Any, Any]:
        """Add a kernel node that waits for nothing; return its handle and its launch parameters."""
        launch = self.driver.CUDA_KERNEL_NODE_PARAMS()
        launch.func = function
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = blocks, 1, 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = threads, 1, 1
        launch.sharedMemBytes = 0
        arguments.given_to(launch)
        return check(self.driver.cuGraphAddKernelNode, self.graph, None, 0, launch), launch

    def begin_with(self, added: Sequence[Any]) -> None:
        """Let nodes that were added run one after the other, and before everything that was captured.

        Edges lead only to captured nodes that wait for nothing, by the edges that the graph has now: with one to every
        node that needs it, replays of graphs of some hundred nodes took up to twice as long.
        """
        _, count = check(self.driver.cuGraphGetRootNodes, self.graph, 0)
        own = {int(handle) for handle in added}
        roots = [one for one in check(self.driver.cuGraphGetRootNodes, self.graph, count)[0] if int(one) not in own]
        edges = [*pairwise(added), *((added[-1], root) for root in roots)]
        sources, targets = ([edge[side] for edge in edges] for side in (0, 1))
        check(self.driver.cuGraphAddDependencies, self.graph, sources, targets, None, len(edges))


def pointer(address: int) -> bytes:
    """Return an address as a kernel's argument."""
    return address.to_bytes(WORD_BYTES, "little")


def unsigned(value: int) -> bytes:
    """Return a 32-bit number as a kernel's argument."""
    return value.to_bytes(4, "little")


class LaunchParameters:
    """Hold memory for a launch's arguments as the driver takes them: a buffer for each, and their addresses.

    The memory stays where it is for as long as this object lives.
    """

    def __init__(self, contents: Sequence[bytes]) -> None:
        self._buffers = [ctypes.create_string_buffer(content, len(content)) for content in contents]
        self._addresses = [ctypes.addressof(buffer) for buffer in self._buffers]
        self._array = (ctypes.c_void_p * len(contents))(*self._addresses)

    def given_to(self, launch: Any) -> Any:
        """Return a launch of the driver's, which reads its arguments here from now on."""
        launch.kernelParams = ctypes.addressof(self._array)
        launch.extra = 0
        return launch

    def word(self, parameter: int, offset: int) -> ctypes.c_uint64:
        """Return the eight bytes at `offset` bytes into a parameter; setting its `value` writes them."""
        self.place(parameter, offset, WORD_BYTES)
        return ctypes.c_uint64.from_buffer(self._buffers[parameter], offset)

    def place(self, parameter: int, offset: int, size: int) -> int:
        """Return the address of `size` bytes at `offset` bytes into a parameter.

        Raises:
            ValueError: the parameter ends before.
        """
        has = len(self._buffers[parameter])
        if offset + size > has:
            raise ValueError(f"{size} bytes at {offset} do not fit parameter {parameter} of {has} bytes")
        return self._addresses[parameter] + offset
