"""Describe a captured CUDA graph as plain records: its nodes with all their parameter bytes, and its edges.

All analysis works on these records, so that it runs, and is tested, without a GPU. `read` fills them from a `CUgraph`.
They can be saved as JSON (bytes as hex): a capture made on one machine is test data on another.

Records are immutable, and validated when they are built or loaded: an edge to a missing node, a parameter whose bytes
do not match its size, or an unknown field raises at once. Parameters and edges, of which a graph has thousands, are no
models: their numbers are only checked when they are loaded.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

WORD_BYTES = 8
"""Size of a device address, and so of the parameter words that may hold one."""

STEP_BYTES = 4
"""The smallest distance between two offsets at which an address may begin."""

Uint32 = Annotated[int, Field(ge=0, lt=2**32)]
Uint64 = Annotated[int, Field(ge=0, lt=2**64)]
Dim3 = tuple[Uint32, Uint32, Uint32]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_bytes="hex", val_json_bytes="hex")


class MemoryRange(_Record):
    """Describe device memory from `address` on, `size_bytes` long."""

    address: Uint64
    size_bytes: Uint64

    def __contains__(self, address: int) -> bool:
        return self.address <= address < self.address + self.size_bytes

    @property
    def span(self) -> tuple[int, int]:
        """Return the first address, and the first one after it."""
        return self.address, self.address + self.size_bytes

    def overlaps(self, other: MemoryRange) -> bool:
        """Return whether some of it lies in the other."""
        ends = self.address + self.size_bytes, other.address + other.size_bytes
        return self.address < ends[1] and other.address < ends[0]


class Placeholder(_Record):
    """Hold the memory of recording input `input` during one capture.

    `memory` goes from its `data_ptr` to the end of its last element; `input` is the index in the recording's inputs.
    """

    input: Annotated[int, Field(ge=0)]
    memory: MemoryRange


@dataclass(frozen=True, slots=True)
class Parameter:
    """Hold one kernel parameter: its offset in the device-side parameter buffer, and its bytes as captured."""

    offset: Uint32
    size: Uint32
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != self.size:
            raise ValueError(
                f"parameter at offset {self.offset} has {len(self.data)} bytes of data but size {self.size}"
            )


class KernelNode(_Record):
    """Describe a kernel launch.

    `function` is the driver's handle: it identifies a function within one process and has no meaning in another.
    `name` is the mangled name, None where the driver does not know it.
    """

    kind: Literal["kernel"] = "kernel"
    name: str | None
    function: Uint64
    grid: Dim3
    block: Dim3
    shared_bytes: Uint32
    parameters: tuple[Parameter, ...]


class MemcpyEnd(_Record):
    """Describe one end of a copy.

    `address` is the base address, 0 where `memory` is an array; offsets and pitch are as given to the driver, in bytes
    (`x_bytes`, `pitch_bytes`), rows (`y`, `height`) and slices (`z`).
    """

    memory: Literal["host", "device", "array", "unified"]
    address: Uint64
    x_bytes: Uint64 = 0
    y: Uint64 = 0
    z: Uint64 = 0
    level_of_detail: Uint64 = 0
    pitch_bytes: Uint64 = 0
    height: Uint64 = 0


class MemcpyNode(_Record):
    """Describe a copy of `depth` slices of `height` rows of `width_bytes`."""

    kind: Literal["memcpy"] = "memcpy"
    source: MemcpyEnd
    destination: MemcpyEnd
    width_bytes: Uint64
    height: Uint64
    depth: Uint64


class MemsetNode(_Record):
    """Describe a fill of `height` rows of `width` elements of `element_bytes` with `value`."""

    kind: Literal["memset"] = "memset"
    address: Uint64
    pitch_bytes: Uint64
    value: Uint32
    element_bytes: Uint32
    width: Uint64
    height: Uint64


class OtherNode(_Record):
    """Name the type of any other node as the driver does, without its prefix (`EMPTY`, `HOST`, `GRAPH`, ...).

    `GRAPH` is a graph inside of the graph, as a program's own graph that it launches in a capture.
    """

    kind: Literal["other"] = "other"
    type_name: str


Node = Annotated[KernelNode | MemcpyNode | MemsetNode | OtherNode, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True)
class Edge:
    """Describe that `target` waits for `source` (indices in one graph).

    Ports and type are 0 except for programmatic launches.
    """

    source: Annotated[int, Field(ge=0)]
    target: Annotated[int, Field(ge=0)]
    from_port: Annotated[int, Field(ge=0, lt=256)] = 0
    to_port: Annotated[int, Field(ge=0, lt=256)] = 0
    dependency_type: Annotated[int, Field(ge=0, lt=256)] = 0


class CapturedGraph(_Record):
    """Hold nodes in the driver's order, and the edges between them."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    @model_validator(mode="after")
    def _edges_lead_somewhere(self) -> Self:
        for edge in self.edges:
            if max(edge.source, edge.target) >= len(self.nodes):
                raise ValueError(f"edge {edge.source} -> {edge.target} in a graph of {len(self.nodes)} nodes")
        return self


class Capture(_Record):
    """Hold one capture: the graph, its inputs' placeholders, and the memory that the graph owns.

    `owned` are the segments of the graph's memory pool at the time of the capture. Two captures put intermediates at
    different addresses; a word that points into owned memory in both is the address of an intermediate, not an input.
    """

    graph: CapturedGraph
    placeholders: tuple[Placeholder, ...]
    owned: tuple[MemoryRange, ...] = ()

    @model_validator(mode="after")
    def _placeholders_differ(self) -> Self:
        inputs = [placeholder.input for placeholder in self.placeholders]
        if len(set(inputs)) != len(inputs):
            raise ValueError(f"more than one placeholder for an input: {sorted(inputs)}")
        return self


def difference(first: CapturedGraph, second: CapturedGraph) -> str | None:
    """Describe a difference between the graphs other than addresses and parameter bytes; None if there is none."""
    if len(first.nodes) != len(second.nodes):
        return f"{len(first.nodes)} nodes in one capture and {len(second.nodes)} in the other"
    for index, (one, other) in enumerate(zip(first.nodes, second.nodes, strict=True)):
        if one.kind != other.kind:
            return f"node {index} is a {one.kind} node in one capture and a {other.kind} node in the other"
        shapes = _shape(one), _shape(other)
        for field, value in shapes[0].items():
            if value != shapes[1][field]:
                return f"node {index} ({one.kind}) differs in {field}: {value} and {shapes[1][field]}"
    if set(first.edges) != set(second.edges):
        return "the dependencies between the nodes differ"
    return None


def _shape(node: Node) -> dict[str, Any]:
    """Return the fields of a node that must agree, without addresses and parameter bytes."""
    shape = node.model_dump(
        exclude={"parameters": True, "address": True, "source": {"address"}, "destination": {"address"}}
    )
    if isinstance(node, KernelNode):
        shape["parameter layout"] = [(parameter.offset, parameter.size) for parameter in node.parameters]
    return shape


def addresses_between(nodes: Sequence[Node], low: int, high: int) -> list[list[int]]:
    """Return for each node the words from `low` up to, but not including, `high`, which may be addresses.

    In parameters one may begin at every fourth byte. All parameters are searched at once, as there are thousands.
    """
    found: list[list[int]] = [[] for _ in nodes]
    owners, starts, sizes, contents, length = [], [], [], [], 0
    for index, node in enumerate(nodes):
        if isinstance(node, KernelNode):
            for parameter in node.parameters:
                owners.append(index)
                starts.append(length)
                sizes.append(parameter.size)
                contents.append(parameter.data.ljust(-(-parameter.size // STEP_BYTES) * STEP_BYTES, b"\0"))
                length += len(contents[-1])
        elif isinstance(node, MemsetNode):
            found[index] = [node.address]
        elif isinstance(node, MemcpyNode):
            found[index] = [end.address + end.x_bytes for end in (node.source, node.destination)]
        found[index] = [address for address in found[index] if low <= address < high]
    content = b"".join(contents)
    for offset in (0, STEP_BYTES):
        words = np.frombuffer(content, "<u8", max(0, length - offset) // WORD_BYTES, min(offset, length))
        places = np.flatnonzero((words >= np.uint64(low)) & (words < np.uint64(high)))
        holding = np.searchsorted(starts, places * WORD_BYTES + offset, side="right") - 1
        for place, parameter_index in zip(places.tolist(), holding.tolist(), strict=True):
            if place * WORD_BYTES + offset - starts[parameter_index] + WORD_BYTES <= sizes[parameter_index]:
                found[owners[parameter_index]].append(int(words[place]))
    return found


def words_in(parameter: Parameter) -> Iterator[tuple[int, int]]:
    """Yield byte offset and value of each word. A packed structure may have words that are not aligned."""
    for offset in range(0, parameter.size - WORD_BYTES + 1, STEP_BYTES):
        yield offset, struct.unpack_from("<Q", parameter.data, offset)[0]
