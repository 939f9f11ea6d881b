"""Make the pointer table of one executable graph, from which its prelude reads pointers.

Note [How the table is written]. A replay that finds moved inputs must change the table after earlier replays have read
it, and before its own kernels do. So the graph itself begins with the kernel that writes the table and takes the words
by value as its argument. A moved input costs setting this one node from the host, independent of the number of kernels
that read the table. The driver keeps the arguments of running launches, so no buffer is shared with a call in flight,
and nothing waits. If nothing moves the node is disabled (`cuGraphNodeSetEnabled`): the words are in device memory since
the previous launch. Alternatives were a separate launch before the graph's (measured at two to three times the cost), a
copy from pageable memory, and pinned buffers, which must not be reused before an event has completed.

A node takes up to `WORDS_PER_NODE` words; larger tables have several nodes. The driver copies all bytes of the
arguments, so small tables use kernels with fewer words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from optimizations.graph.device import DeviceTools
from optimizations.graph.driver import compile_cubin
from optimizations.graph.editing import EditableGraph, LaunchParameters, pointer, unsigned
from optimizations.graph.host import AddressPlace, NodeUpdate
from optimizations.graph.plan import Slot
from optimizations.graph.records import WORD_BYTES
from optimizations.graph.tensor_map import TensorMapCell

KERNEL_NAME = "encore_write_pointers"
THREADS_PER_BLOCK = 128
WORDS_PER_NODE = 480
"""Kernel arguments may take 4096 bytes on every driver and GPU that PyTorch runs on."""

CAPACITIES = (16, 96, WORDS_PER_NODE)
"""Numbers of words that kernels are built for, ascending. The smallest fits one tensor map."""

SOURCE = """
struct Words {{ unsigned long long word[{capacity}]; }};

extern "C" __global__ void {name}(unsigned long long* destination, unsigned count, const Words words)
{{
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count) destination[index] = words.word[index];
}}
"""

_WORDS = 2
"""The index of the kernel's parameter that has the words."""


def build_table_kernel(target: str, capacity: int) -> bytes:
    """Return the cubin of the kernel that writes up to `capacity` words, for `target` (`sm_90`)."""
    return compile_cubin(SOURCE.format(capacity=capacity, name=KERNEL_NAME), f"{KERNEL_NAME}.cu", target)


class PointerTable:
    """Hold a table on the device, and the nodes that write it at the start of `target`, which is not instantiated yet.

    All `slots` together fill the table without gaps.
    """

    def __init__(self, target: EditableGraph, slots: Sequence[Slot], tools: DeviceTools) -> None:
        size = sum(slot.size_bytes for slot in slots)
        self.memory = torch.zeros(size // WORD_BYTES, dtype=torch.int64, device=tools.device)
        self.address = self.memory.data_ptr()
        self.nodes = tuple(_table_node(target, part, self.address, tools) for part in _parts(slots))


def _table_node(target: EditableGraph, slots: Sequence[Slot], table_address: int, tools: DeviceTools) -> NodeUpdate:
    """Add a node that writes some adjacent slots of the table."""
    start = slots[0].offset_bytes
    count = sum(slot.size_bytes for slot in slots) // WORD_BYTES
    capacity = next(capacity for capacity in CAPACITIES if count <= capacity)
    parameters = LaunchParameters([pointer(table_address + start), unsigned(count), bytes(capacity * WORD_BYTES)])
    places = []
    for slot in slots:
        offset = slot.offset_bytes - start
        holder: Any = parameters.word(_WORDS, offset)
        if slot.tensor_map is not None:
            where = parameters.place(_WORDS, offset, slot.size_bytes)
            holder = TensorMapCell(where, slot.tensor_map, tools.replace_address)
        places.append(AddressPlace(slot.input, slot.delta, slot.size_bytes, holder))
    function = tools.function(build_table_kernel, KERNEL_NAME, capacity)
    blocks = -(-count // THREADS_PER_BLOCK)
    handle, launch = target.add_kernel(function, blocks, THREADS_PER_BLOCK, parameters)
    return NodeUpdate(target, handle, target.driver.cuGraphExecKernelNodeSetParams, (launch,), places, parameters)


def _parts(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Return the slots in order, in parts of at most `WORDS_PER_NODE` words."""
    parts: list[list[Slot]] = []
    words = WORDS_PER_NODE
    for slot in slots:
        taken = slot.size_bytes // WORD_BYTES
        if words + taken > WORDS_PER_NODE:
            parts.append([])
            words = 0
        parts[-1].append(slot)
        words += taken
    return parts
