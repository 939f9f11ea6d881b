"""Make the pointer table of one executable graph, from which its prelude reads pointers.

Note [How the table is written]. A replay that finds moved inputs must change the table after the replays before it have
read it, and before its own kernels do. So the graph itself begins with the kernel that writes it, which takes the words
by value as its argument: setting that one node from the host is all a moved input costs, whatever the number of kernels
that read it. The driver keeps the arguments of launches that are under way, so there is no buffer that a call in flight
might still be reading, and nothing waits. Where nothing moves the node is switched off (`cuGraphNodeSetEnabled`): the
words are in device memory since the launch before. The other choices were its own launch before the graph's
(measured at two to three times the cost), a copy from pageable memory, and pinned buffers, which must not be reused
before an event says so.

A node takes up to `WORDS_PER_NODE` words; larger tables have several. The driver carries all bytes of the arguments, so
there is a kernel for small tables that has few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimizations.compiled_cache import CompiledCache
from optimizations.graph.driver import check, compile_cubin
from optimizations.graph.editing import EditableGraph, LaunchParameters, pointer, unsigned
from optimizations.graph.plan import Slot
from optimizations.graph.protocol import AddressCell, AddressPlace
from optimizations.graph.records import WORD_BYTES
from optimizations.graph.tensor_map import ReplaceAddress, TensorMapCell

KERNEL_NAME = "encore_write_pointers"
THREADS_PER_BLOCK = 128
WORDS_PER_NODE = 480
"""Kernel arguments may take 4096 bytes on every driver and GPU that PyTorch runs on."""

CAPACITIES = (16, 96, WORDS_PER_NODE)
"""Words that kernels are built for, ascending. The smallest has room for one tensor map."""

SOURCE = """
struct Words {{ unsigned long long word[{capacity}]; }};

extern "C" __global__ void {name}(unsigned long long* destination, unsigned count, const Words words)
{{
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count) destination[index] = words.word[index];
}}
"""

TableFunction = Callable[[int], Any]
"""The kernel for a capacity, loaded."""

_WORDS = 2
"""Which parameter of the kernel the words are."""


class TableUnavailable(RuntimeError):
    """No pointer table can be written here; the message says why."""


def build_table_kernel(target: str, cache: CompiledCache, capacity: int) -> bytes:
    """Return the cubin, cached or compiled, of the kernel that writes up to `capacity` words, for `target` (`sm_90`).

    Raises:
        TableUnavailable: NVRTC is missing, or it refused the target; the message holds what it said.
    """
    try:
        from cuda.bindings import nvrtc

        version = ".".join(str(part) for part in check(nvrtc.nvrtcVersion))
        source = SOURCE.format(capacity=capacity, name=KERNEL_NAME)
        key = ("table", source, target, version)
        return cache.get_or_build(key, lambda: compile_cubin(nvrtc, source, f"{KERNEL_NAME}.cu", target)).image
    except (ImportError, RuntimeError, OSError) as error:
        raise TableUnavailable(
            f"the pointer table needs NVRTC, which comes with torch's CUDA wheels ({error})"
        ) from error


class PointerTable:
    """Hold a table on the device, and the nodes at the start of `target` that write it.

    Args:
        target: the graph, not instantiated yet.
        slots: all slots; together they fill the table without gaps.
        function: gives the kernels, loaded.
        device: where the table is.
        replace_address: how a tensor map's address is replaced; None where there are no tensor maps.
    """

    def __init__(
        self,
        target: EditableGraph,
        slots: Sequence[Slot],
        function: TableFunction,
        device: torch.device,
        replace_address: ReplaceAddress | None,
    ) -> None:
        size = sum(slot.size_bytes for slot in slots)
        self.memory = torch.zeros(size // WORD_BYTES, dtype=torch.int64, device=device)
        self.address = self.memory.data_ptr()
        self.nodes = tuple(TableNode(target, part, function, self.address, replace_address) for part in _parts(slots))


class TableNode:
    """Update a node that writes some adjoining slots of the table. It is a `protocol.NodeUpdate`."""

    def __init__(
        self,
        target: EditableGraph,
        slots: Sequence[Slot],
        function: TableFunction,
        table_address: int,
        replace_address: ReplaceAddress | None,
    ) -> None:
        start = slots[0].offset_bytes
        count = sum(slot.size_bytes for slot in slots) // WORD_BYTES
        capacity = next(capacity for capacity in CAPACITIES if count <= capacity)
        self._parameters = LaunchParameters(
            [pointer(table_address + start), unsigned(count), bytes(capacity * WORD_BYTES)]
        )
        self.places = [
            AddressPlace(
                slot.input, slot.delta, slot.size_bytes, self._cell(slot, slot.offset_bytes - start, replace_address)
            )
            for slot in slots
        ]
        blocks = -(-count // THREADS_PER_BLOCK)
        self.handle, self._launch = target.add_kernel(function(capacity), blocks, THREADS_PER_BLOCK, self._parameters)
        self._set = target.driver.cuGraphExecKernelNodeSetParams
        self._set_enabled = target.driver.cuGraphNodeSetEnabled
        self._enabled = True

    def _cell(self, slot: Slot, offset: int, replace_address: ReplaceAddress | None) -> AddressCell:
        if slot.tensor_map is None:
            return self._parameters.word(_WORDS, offset)
        return TensorMapCell(self._parameters.place(_WORDS, offset, slot.size_bytes), slot.tensor_map, replace_address)

    def set(self, executable: Any) -> None:
        """Give what the cells hold now to the node in `executable`, and enable it."""
        check(self._set, executable, self.handle, self._launch)
        if not self._enabled:
            check(self._set_enabled, executable, self.handle, 1)
            self._enabled = True

    def rest(self, executable: Any) -> None:
        """Disable the node in the next launches, because the table is up to date."""
        if self._enabled:
            self._enabled = False  # first: an interrupt after the driver call must not leave it off and taken for on
            check(self._set_enabled, executable, self.handle, 0)


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
