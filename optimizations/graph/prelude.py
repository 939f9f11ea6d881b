"""Implement the updater `prelude`: a kernel at the graph's start writes other nodes' parameters from the pointer table.

Callers keep the rules of device-updatable nodes (CUDA driver API,
`CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE`). The attribute is set before the graph's only instantiation and
cannot be unset. The executable graph is uploaded before its first launch. Such a node is never set from the host (an
upload, or the next launch, would overwrite the device's update), and `cuGraphExecUpdate` is never called on the graph.

The kernel runs after the nodes that write the pointer table and before all nodes that it updates.

Compiled with NVRTC, linked by nvJitLink with `libcudadevrt.a`; all three come with the torch wheel, so no CUDA toolkit
is needed. `cudaGraphKernelNodeSetParam` is in CUDA Programming Guide, "Device Graph Launch" and "Device-side updates";
it needs a driver of 12.4 or newer.

The arguments of a launch are the pointer table, an array of `Node`, an array of `Update`, the number of nodes
(unsigned), and a 32-bit status word, 0 before the launch, which holds the `cudaError_t` of a failed update after it.
One thread writes one node, all its parameters in order, so that no two threads update the same node.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from optimizations.graph.device import DeviceTools
from optimizations.graph.driver import KernelUnavailable, check, compile_cubin
from optimizations.graph.editing import EditableGraph, LaunchParameters, pointer, unsigned
from optimizations.graph.plan import ParameterUpdate, PlannedNode

KERNEL_NAME = "encore_prelude"
THREADS_PER_BLOCK = 128

SOURCE = """
struct Node {
    cudaGraphDeviceNode_t handle;
    unsigned first_update;
    unsigned update_count;
};
struct Update {
    unsigned buffer_offset;
    unsigned slot_offset;
    unsigned size_bytes;
};
static_assert(sizeof(Node) == 16, "packed by pack_tables");
static_assert(sizeof(Update) == 12, "packed by pack_tables");

extern "C" __global__ void encore_prelude(
    const unsigned char* table, const Node* nodes, const Update* updates, unsigned node_count, unsigned* status)
{
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= node_count) return;
    const Node node = nodes[index];
    for (unsigned i = 0; i < node.update_count; ++i) {
        const Update update = updates[node.first_update + i];
        const cudaError_t result = cudaGraphKernelNodeSetParam(
            node.handle, update.buffer_offset, table + update.slot_offset, update.size_bytes);
        if (result != cudaSuccess) atomicCAS(status, 0u, static_cast<unsigned>(result));
    }
    // A node launched programmatically starts before this kernel ends and must see the update.
    __threadfence();
}
"""

_NODE = struct.Struct("<QII")
_UPDATE = struct.Struct("<III")


def pack_tables(nodes: Sequence[tuple[int, Sequence[ParameterUpdate]]]) -> tuple[bytes, bytes]:
    """Return the arrays of `Node` and `Update`: the `devNode` handle of each node, and its updates."""
    packed_nodes, packed_updates, count = bytearray(), bytearray(), 0
    for handle, updates in nodes:
        packed_nodes += _NODE.pack(handle, count, len(updates))
        for update in updates:
            packed_updates += _UPDATE.pack(update.buffer_offset, update.slot.offset_bytes, update.slot.size_bytes)
        count += len(updates)
    return bytes(packed_nodes), bytes(packed_updates)


def build_prelude(target: str) -> bytes:
    """Return the cubin of the prelude for `target` (`sm_90`), compiled and linked.

    Raises:
        KernelUnavailable: a library is missing, or it refused the target; the message has its log.
    """
    try:
        from cuda.bindings import nvjitlink
        from cuda.pathfinder import find_static_lib

        device_runtime = Path(find_static_lib("cudadevrt"))
    except (ImportError, RuntimeError, OSError) as error:
        raise KernelUnavailable(
            f"the prelude needs nvJitLink and libcudadevrt.a, which come with torch's CUDA wheels ({error})"
        ) from error
    compiled = compile_cubin(SOURCE, f"{KERNEL_NAME}.cu", target, ("-rdc=true", "-default-device"))
    return _linked(nvjitlink, compiled, device_runtime, target)


def _linked(linker: Any, compiled: bytes, device_runtime: Path, target: str) -> bytes:
    try:
        handle = linker.create(1, [f"-arch={target}"])
    except linker.nvJitLinkError as error:
        raise KernelUnavailable(f"nvJitLink for {target}: {error}") from error
    try:
        linker.add_data(handle, linker.InputType.CUBIN, compiled, len(compiled), KERNEL_NAME)
        linker.add_file(handle, linker.InputType.LIBRARY, str(device_runtime))
        linker.complete(handle)
        image = bytearray(linker.get_linked_cubin_size(handle))
        linker.get_linked_cubin(handle, image)
        return bytes(image)
    except linker.nvJitLinkError as error:
        log = bytearray(linker.get_error_log_size(handle))
        linker.get_error_log(handle, log)
        text = bytes(log).rstrip(b"\0").decode(errors="replace").strip()
        raise KernelUnavailable(f"nvJitLink for {target}: {error}: {text}") from error
    finally:
        linker.destroy(handle)


class Prelude:
    """Make kernel nodes of a graph device-updatable, and add one kernel that writes the parameters of all of them.

    The graph is instantiated afterwards.

    Attributes:
        handle: the added kernel node, which must run before all nodes that it updates and after the table is written.
        memory: the memory that the kernel reads and writes. It must outlive the graph.
    """

    def __init__(
        self,
        target: EditableGraph,
        nodes: Sequence[PlannedNode],
        table_address: int,
        tools: DeviceTools,
    ) -> None:
        function = tools.function(build_prelude, KERNEL_NAME)
        tables = pack_tables(
            [(_make_updatable(target.driver, target.handles[node.node]), node.updates) for node in nodes]
        )
        self._nodes, self._updates = (_on_device(table, tools.device) for table in tables)
        self._status = torch.zeros(1, dtype=torch.int32, device=tools.device)
        arguments = LaunchParameters(
            [
                pointer(table_address),
                pointer(self._nodes.data_ptr()),
                pointer(self._updates.data_ptr()),
                unsigned(len(nodes)),
                pointer(self._status.data_ptr()),
            ]
        )
        self.memory = (self._nodes, self._updates, self._status)
        self.handle, _ = target.add_kernel(function, -(-len(nodes) // THREADS_PER_BLOCK), THREADS_PER_BLOCK, arguments)

    def failure(self) -> str | None:
        """Return the first update that failed in an earlier launch; None if none did. Waits for the device."""
        code = int(self._status.item())
        return f"the prelude could not update a node (cudaError_t {code})" if code else None


def _make_updatable(driver: Any, handle: Any) -> int:
    """Make a kernel node device-updatable; return its device handle (`devNode`)."""
    kind = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE
    value = driver.CUkernelNodeAttrValue()
    value.deviceUpdatableKernelNode.deviceUpdatable = 1
    check(driver.cuGraphKernelNodeSetAttribute, handle, kind, value)
    return int(check(driver.cuGraphKernelNodeGetAttribute, handle, kind).deviceUpdatableKernelNode.devNode)


def _on_device(content: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
