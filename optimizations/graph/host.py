"""Set nodes of an executable graph from the host: the updater `host`, and the nodes that write the pointer table.

Note [Parameters of an executable graph]. There is no getter for them, so they are kept here: for a kernel one buffer
per parameter, filled with the bytes that were captured. The structure given to the driver is the one it gave for the
node, with every launch field as it was; only `kernelParams` points to these buffers (the node's own memory is never
written). Attributes, such as cluster dimensions, belong to the node and are left alone by setting its parameters.
Launches already enqueued keep what they were launched with (CUDA driver API, `cuGraphExecKernelNodeSetParams`).

Note [Cells]. A call with moved inputs goes over the places that hold their addresses and nothing else. So each place
is prepared as a cell, a view of the eight bytes (or what makes a tensor map of an address), and the call only assigns
to its `value`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from optimizations.graph.driver import check
from optimizations.graph.editing import EditableGraph, LaunchParameters
from optimizations.graph.plan import PlannedNode
from optimizations.graph.pointers import UseKind
from optimizations.graph.protocol import AddressCell, AddressPlace, NodeUpdate
from optimizations.graph.records import WORD_BYTES, KernelNode, MemcpyNode
from optimizations.graph.tensor_map import TENSOR_MAP_BYTES, ReplaceAddress, TensorMapCell


class HostUpdates:
    """Update one executable graph from the host. The graph it was instantiated from must be kept as long as this."""

    def __init__(self, updates: Sequence[NodeUpdate], executable: Any) -> None:
        self._executable = executable
        self._updates = tuple(updates)
        self._places: dict[int, list[tuple[AddressCell, int, int, NodeUpdate]]] = defaultdict(list)
        for update in updates:
            for place in update.places:
                self._places[place.input].append((place.cell, place.delta, place.size_bytes, update))

    def point(self, addresses: Mapping[int, int]) -> int:
        """Write these addresses (by input), set each node that uses one of them once, and return the bytes written.

        Raises:
            AddressRefused: an address cannot be put into a tensor map.
        """
        concerned: dict[NodeUpdate, None] = {}
        written = 0
        for index, address in addresses.items():
            for cell, delta, size, update in self._places.get(index, ()):
                cell.value = address + delta
                written += size
                concerned[update] = None
        for update in concerned:
            update.set(self._executable)
        return written

    def settle(self) -> None:
        """Do nothing: a node reads what it was set to last."""

    def renew(self, executable: Any) -> None:
        """Set all nodes in another executable of the graph as in the one before, and use it from now on.

        Raises:
            CudaCallFailed: the driver does not take that.
        """
        self._executable = executable
        for update in self._updates:
            update.set(executable)


def node_update(target: EditableGraph, node: PlannedNode, replace_address: ReplaceAddress | None) -> NodeUpdate:
    """Return the update of a node of `target` from the host: one driver call sets it."""
    (index,) = node.node
    record = target.captured.nodes[index]
    if isinstance(record, KernelNode):
        return _KernelUpdate(target, node, replace_address)
    if isinstance(record, MemcpyNode):
        return _MemcpyUpdate(target, node)
    return _MemsetUpdate(target, node)


class _KernelUpdate:
    def __init__(self, target: EditableGraph, node: PlannedNode, replace_address: ReplaceAddress | None) -> None:
        record = target.kernel(node.node)
        self._call = target.driver.cuGraphExecKernelNodeSetParams
        self._handle = target.handle(node.node)
        self._parameters = LaunchParameters([parameter.data for parameter in record.parameters])
        self._launch = check(target.driver.cuGraphKernelNodeGetParams, self._handle)
        self._launch.kernelParams = self._parameters.address
        self._launch.extra = 0
        self.places = []
        for use in node.uses:
            if use.kind is UseKind.TENSOR_MAP:
                data = record.parameters[use.parameter].data[use.byte_offset : use.byte_offset + TENSOR_MAP_BYTES]
                where = self._parameters.place(use.parameter, use.byte_offset, TENSOR_MAP_BYTES)
                cell: AddressCell = TensorMapCell(where, data, replace_address)
                self.places.append(AddressPlace(use.input, use.delta, TENSOR_MAP_BYTES, cell))
            else:
                cell = self._parameters.word(use.parameter, use.byte_offset)
                self.places.append(AddressPlace(use.input, use.delta, WORD_BYTES, cell))

    def set(self, executable: Any) -> None:
        check(self._call, executable, self._handle, self._launch)


class _Field:
    """Give a field of one of the driver's structures the interface of a cell."""

    def __init__(self, structure: Any, name: str) -> None:
        self._structure = structure
        self._name = name

    @property
    def value(self) -> int:
        return int(getattr(self._structure, self._name))

    @value.setter
    def value(self, address: int) -> None:
        setattr(self._structure, self._name, address)


class _MemcpyUpdate:
    def __init__(self, target: EditableGraph, node: PlannedNode) -> None:
        self._call = target.driver.cuGraphExecMemcpyNodeSetParams
        self._handle = target.handle(node.node)
        self._context = target.context
        self._copy = check(target.driver.cuGraphMemcpyNodeGetParams, self._handle)
        fields = {UseKind.MEMCPY_SOURCE: "srcDevice", UseKind.MEMCPY_DESTINATION: "dstDevice"}
        self.places = [
            AddressPlace(use.input, use.delta, WORD_BYTES, _Field(self._copy, fields[use.kind])) for use in node.uses
        ]

    def set(self, executable: Any) -> None:
        check(self._call, executable, self._handle, self._copy, self._context)


class _MemsetUpdate:
    def __init__(self, target: EditableGraph, node: PlannedNode) -> None:
        self._call = target.driver.cuGraphExecMemsetNodeSetParams
        self._handle = target.handle(node.node)
        self._context = target.context
        self._fill = check(target.driver.cuGraphMemsetNodeGetParams, self._handle)
        self.places = [AddressPlace(use.input, use.delta, WORD_BYTES, _Field(self._fill, "dst")) for use in node.uses]

    def set(self, executable: Any) -> None:
        check(self._call, executable, self._handle, self._fill, self._context)
