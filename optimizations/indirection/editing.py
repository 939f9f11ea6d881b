"""A captured graph that is about to be changed and instantiated, as the appliers see it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optimizations.replay.captured import CapturedGraph, KernelNode, NodePath
from optimizations.replay.driver import check
from optimizations.replay.driver_read import node_handles


@dataclass(frozen=True, slots=True)
class EditableGraph:
    """A `CUgraph`, its `CUgraphNode`s in the order of the nodes of `captured`, and the context it runs in."""

    driver: Any
    graph: Any
    handles: Sequence[Any]
    captured: CapturedGraph
    context: Any

    @classmethod
    def of(cls, driver: Any, graph: Any, captured: CapturedGraph) -> EditableGraph:
        """`graph` itself, which `captured` was read from, in the current context."""
        return cls(driver, graph, tuple(node_handles(driver, graph)), captured, check(driver.cuCtxGetCurrent))

    def clone(self) -> EditableGraph:
        """A copy that can be changed without touching this one; to be given to `cuGraphDestroy`."""
        copy = check(self.driver.cuGraphClone, self.graph)
        handles = tuple(check(self.driver.cuGraphNodeFindInClone, handle, copy) for handle in self.handles)
        return EditableGraph(self.driver, copy, handles, self.captured, self.context)

    def handle(self, node: NodePath) -> Any:
        """The handle of a node of the graph itself; nodes of child graphs cannot be changed one by one."""
        (index,) = node
        return self.handles[index]

    def kernel(self, node: NodePath) -> KernelNode:
        """The record of a kernel node."""
        (index,) = node
        record = self.captured.nodes[index]
        if not isinstance(record, KernelNode):
            raise TypeError(f"node {index} is a {record.kind} node, not a kernel")
        return record


class LaunchParameters:
    """Memory for the arguments of a kernel launch, as the driver takes them: a buffer for each, and their addresses."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        self._buffers = [ctypes.create_string_buffer(content, len(content)) for content in contents]
        self._addresses = [ctypes.addressof(buffer) for buffer in self._buffers]
        self._array = (ctypes.c_void_p * len(contents))(*self._addresses)

    @property
    def address(self) -> int:
        """For the field `kernelParams`."""
        return ctypes.addressof(self._array)

    def write(self, parameter: int, offset: int, content: bytes) -> None:
        """Put `content` at `offset` bytes into a parameter."""
        if offset + len(content) > len(self._buffers[parameter]):
            size = len(self._buffers[parameter])
            raise ValueError(f"{len(content)} bytes at {offset} do not fit parameter {parameter} of {size} bytes")
        ctypes.memmove(self._addresses[parameter] + offset, content, len(content))
