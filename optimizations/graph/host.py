"""Set nodes of an executable graph from the host: the updater `host`, and the nodes that write the pointer table.

Note [Parameters of an executable graph]. The driver has no getter for them, so they are stored here: for a kernel one
buffer per parameter, filled with the captured bytes. The structure passed to the driver is the one it returned for the
node, with all launch fields unchanged; only `kernelParams` points to these buffers (the node's own memory is never
written). Attributes, such as cluster dimensions, belong to the node, and setting its parameters does not change them.
Launches already enqueued keep their parameters (CUDA driver API, `cuGraphExecKernelNodeSetParams`).

Note [Places of addresses]. A call with moved inputs only iterates over the places that hold their addresses. So each
place is prepared as an object with an attribute to set: eight bytes of a buffer, a tensor map, or a structure of the
driver's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimizations.graph.driver import check
from optimizations.graph.editing import EditableGraph, LaunchParameters
from optimizations.graph.plan import PlannedNode
from optimizations.graph.pointers import PointerUse, UseKind
from optimizations.graph.records import WORD_BYTES, KernelNode, MemcpyNode
from optimizations.graph.tensor_map import TENSOR_MAP_BYTES, ReplaceAddress, TensorMapCell


@dataclass(frozen=True, slots=True)
class AddressPlace:
    """Hold a place, `size_bytes` long, for the address of `input` plus `delta`. Setting `attribute` writes it."""

    input: int
    delta: int
    size_bytes: int
    holder: Any
    attribute: str = "value"


class NodeUpdate:
    """Set one node, and write the addresses that it holds.

    Args:
        target: the graph.
        handle: the node.
        set_parameters: the driver's function that sets it in an executable graph; `settings` are its arguments.
        places: all places that depend on an address.
        parameters: a kernel's parameter buffers, to which `settings` point; they are kept alive.
    """

    def __init__(
        self,
        target: EditableGraph,
        handle: Any,
        set_parameters: Any,
        settings: tuple[Any, ...],
        places: Sequence[AddressPlace],
        parameters: LaunchParameters | None = None,
    ) -> None:
        self.handle = handle
        self.places = places
        self._parameters = parameters
        self._set_parameters = set_parameters
        self._settings = settings
        self._set_enabled = target.driver.cuGraphNodeSetEnabled
        self._enabled = True

    def set(self, executable: Any) -> None:
        """Set the node in `executable` to the current contents of the places, and enable it."""
        check(self._set_parameters, executable, self.handle, *self._settings)
        if not self._enabled:
            check(self._set_enabled, executable, self.handle, 1)
            self._enabled = True

    def rest(self, executable: Any) -> None:
        """Disable the node in the next launches."""
        if self._enabled:
            self._enabled = False  # set first, in case of an interrupt after the driver call
            check(self._set_enabled, executable, self.handle, 0)


class HostUpdates:
    """Update one executable graph from the host. The graph it was instantiated from must outlive this object."""

    def __init__(self, updates: Sequence[NodeUpdate], executable: Any) -> None:
        self._executable = executable
        self._places: dict[int, list[tuple[AddressPlace, NodeUpdate]]] = defaultdict(list)
        for update in updates:
            for place in update.places:
                self._places[place.input].append((place, update))

    def point(self, addresses: Mapping[int, int]) -> int:
        """Write these addresses (by input), set each node that uses one of them once, and return the bytes written.

        Raises:
            AddressRefused: an address cannot be inserted into a tensor map.
        """
        concerned: dict[NodeUpdate, None] = {}
        written = 0
        for index, address in addresses.items():
            for place, update in self._places.get(index, ()):
                setattr(place.holder, place.attribute, address + place.delta)
                written += place.size_bytes
                concerned[update] = None
        for update in concerned:
            update.set(self._executable)
        return written


def node_update(target: EditableGraph, node: PlannedNode, replace_address: ReplaceAddress | None) -> NodeUpdate:
    """Return the update of a node of `target` from the host: one driver call sets it."""
    driver, handle, record = target.driver, target.handles[node.node], target.captured.nodes[node.node]
    if isinstance(record, KernelNode):
        parameters = LaunchParameters([parameter.data for parameter in record.parameters])
        launch = parameters.given_to(check(driver.cuGraphKernelNodeGetParams, handle))
        places = [_place_in_kernel(use, record, parameters, replace_address) for use in node.uses]
        return NodeUpdate(target, handle, driver.cuGraphExecKernelNodeSetParams, (launch,), places, parameters)
    if isinstance(record, MemcpyNode):
        structure = check(driver.cuGraphMemcpyNodeGetParams, handle)
        set_parameters = driver.cuGraphExecMemcpyNodeSetParams
    else:
        structure = check(driver.cuGraphMemsetNodeGetParams, handle)
        set_parameters = driver.cuGraphExecMemsetNodeSetParams
    places = [AddressPlace(use.input, use.delta, WORD_BYTES, structure, _FIELDS[use.kind]) for use in node.uses]
    return NodeUpdate(target, handle, set_parameters, (structure, target.context), places)


_FIELDS = {UseKind.MEMCPY_SOURCE: "srcDevice", UseKind.MEMCPY_DESTINATION: "dstDevice", UseKind.MEMSET: "dst"}


def _place_in_kernel(
    use: PointerUse, record: KernelNode, parameters: LaunchParameters, replace_address: ReplaceAddress | None
) -> AddressPlace:
    if use.kind is not UseKind.TENSOR_MAP:
        return AddressPlace(use.input, use.delta, WORD_BYTES, parameters.word(use.parameter, use.byte_offset))
    captured = record.parameters[use.parameter].data[use.byte_offset : use.byte_offset + TENSOR_MAP_BYTES]
    where = parameters.place(use.parameter, use.byte_offset, TENSOR_MAP_BYTES)
    return AddressPlace(use.input, use.delta, TENSOR_MAP_BYTES, TensorMapCell(where, captured, replace_address))
