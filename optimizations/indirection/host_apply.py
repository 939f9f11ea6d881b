"""The applier `host`: sets the parameters of the nodes whose input moved, from the host.

Note [Parameters of an executable graph]. There is no getter for them, so they are kept here: for a kernel one buffer
per parameter, filled with the bytes that were captured. The structure given to the driver is the one it gave for the
node, with every launch field as it was, and only `kernelParams` led to these buffers (the node's own memory is never
written). Attributes, such as cluster dimensions, belong to the node and are left alone by setting its parameters.
Launches already enqueued keep what they were launched with (CUDA driver API, `cuGraphExecKernelNodeSetParams`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from optimizations.indirection.editing import EditableGraph, LaunchParameters
from optimizations.indirection.plan import HostNode
from optimizations.indirection.pointers import PointerUse, UseKind
from optimizations.indirection.table import AddressRefused
from optimizations.indirection.tensor_map import TENSOR_MAP_BYTES, ReplaceAddress
from optimizations.replay.captured import WORD_BYTES, KernelNode, MemcpyNode
from optimizations.replay.driver import check


class _Update(Protocol):
    """A node that can be set again and again."""

    def write(self, addresses: Mapping[int, int]) -> int:
        """Put the addresses of inputs into the parameters kept here. Returns the bytes written."""

    def set(self, executable: Any) -> None:
        """Give the parameters to the node in `executable`."""


class HostApplier:
    """Host updates of one executable graph. The graph it was instantiated from must be kept as long as this."""

    def __init__(
        self,
        target: EditableGraph,
        nodes: Sequence[HostNode],
        executable: Any,
        replace_address: ReplaceAddress | None,
    ) -> None:
        self._executable = executable
        self._updates: dict[int, list[_Update]] = defaultdict(list)
        for node in nodes:
            update = _prepare(target, node, replace_address)
            for index in dict.fromkeys(use.input for use in node.uses):
                self._updates[index].append(update)

    def point(self, addresses: Mapping[int, int]) -> int:
        """See `following.Pointers`. A node that uses several of these inputs is set once."""
        concerned: dict[int, _Update] = {}
        for index in addresses:
            for update in self._updates.get(index, ()):
                concerned[id(update)] = update
        written = 0
        for update in concerned.values():
            written += update.write(addresses)
            update.set(self._executable)
        return written


def _prepare(target: EditableGraph, node: HostNode, replace_address: ReplaceAddress | None) -> _Update:
    (index,) = node.node
    record = target.captured.nodes[index]
    if isinstance(record, KernelNode):
        return _KernelUpdate(target, node, replace_address)
    if isinstance(record, MemcpyNode):
        return _MemcpyUpdate(target, node)
    return _MemsetUpdate(target, node)


class _KernelUpdate:
    def __init__(self, target: EditableGraph, node: HostNode, replace_address: ReplaceAddress | None) -> None:
        record = target.kernel(node.node)
        self._call = target.driver.cuGraphExecKernelNodeSetParams
        self._handle = target.handle(node.node)
        self._uses = node.uses
        self._replace_address = replace_address
        self._maps = {
            use: record.parameters[use.parameter].data[use.byte_offset : use.byte_offset + TENSOR_MAP_BYTES]
            for use in node.uses
            if use.kind is UseKind.TENSOR_MAP
        }
        self._parameters = LaunchParameters([parameter.data for parameter in record.parameters])
        self._launch = check(target.driver.cuGraphKernelNodeGetParams, self._handle)
        self._launch.kernelParams = self._parameters.address
        self._launch.extra = 0

    def write(self, addresses: Mapping[int, int]) -> int:
        written = 0
        for use in self._uses:
            if use.input in addresses:
                content = self._content(use, addresses[use.input] + use.delta)
                self._parameters.write(use.parameter, use.byte_offset, content)
                written += len(content)
        return written

    def _content(self, use: PointerUse, address: int) -> bytes:
        if use.kind is not UseKind.TENSOR_MAP:
            return address.to_bytes(WORD_BYTES, "little")
        replaced = self._replace_address(self._maps[use], address) if self._replace_address else None
        if replaced is None:
            raise AddressRefused(f"the driver does not take address {address:#x} in a tensor map of input {use.input}")
        return replaced

    def set(self, executable: Any) -> None:
        check(self._call, executable, self._handle, self._launch)


class _MemcpyUpdate:
    def __init__(self, target: EditableGraph, node: HostNode) -> None:
        self._call = target.driver.cuGraphExecMemcpyNodeSetParams
        self._handle = target.handle(node.node)
        self._context = target.context
        self._uses = node.uses
        self._copy = check(target.driver.cuGraphMemcpyNodeGetParams, self._handle)

    def write(self, addresses: Mapping[int, int]) -> int:
        written = 0
        for use in self._uses:
            if use.input in addresses:
                field = "srcDevice" if use.kind is UseKind.MEMCPY_SOURCE else "dstDevice"
                setattr(self._copy, field, addresses[use.input] + use.delta)
                written += WORD_BYTES
        return written

    def set(self, executable: Any) -> None:
        check(self._call, executable, self._handle, self._copy, self._context)


class _MemsetUpdate:
    def __init__(self, target: EditableGraph, node: HostNode) -> None:
        self._call = target.driver.cuGraphExecMemsetNodeSetParams
        self._handle = target.handle(node.node)
        self._context = target.context
        (self._use,) = node.uses
        self._fill = check(target.driver.cuGraphMemsetNodeGetParams, self._handle)

    def write(self, addresses: Mapping[int, int]) -> int:
        self._fill.dst = addresses[self._use.input] + self._use.delta
        return WORD_BYTES

    def set(self, executable: Any) -> None:
        check(self._call, executable, self._handle, self._fill, self._context)
