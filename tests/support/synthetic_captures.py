"""Synthetic pairs of captures whose pointers are known by construction, as hypothesis strategies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hypothesis import assume, settings
from hypothesis import strategies as st

from optimizations.graph.pointers import PointerUse, UseKind
from optimizations.graph.records import (
    Capture,
    CapturedGraph,
    Edge,
    KernelNode,
    MemcpyEnd,
    MemcpyNode,
    MemoryRange,
    MemsetNode,
    Node,
    OtherNode,
    Parameter,
    Placeholder,
)

STATIC_ADDRESS = 0x7F77_0000_0000
"""The address of weights: the same in every capture."""

OWNED_BYTES = 1 << 20


@dataclass(frozen=True)
class Layout:
    """Addresses of inputs and of the graph's own memory in the first and in the second capture."""

    sizes: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]
    owned: tuple[int, int]

    def capture(self, graph: CapturedGraph, which: int) -> Capture:
        addresses = (self.first, self.second)[which]
        return Capture(
            graph=graph,
            placeholders=tuple(
                Placeholder(input=index, memory=MemoryRange(address=address, size_bytes=size))
                for index, (address, size) in enumerate(zip(addresses, self.sizes, strict=True))
            ),
            owned=(MemoryRange(address=self.owned[which], size_bytes=OWNED_BYTES),),
        )


@st.composite
def layouts(draw: st.DrawFn, minimum: int = 1) -> Layout:
    """Inputs side by side or apart, in another order in the second capture, each moved by its own distance."""
    sizes = draw(st.lists(st.integers(0, 6000), min_size=minimum, max_size=5))
    gaps = st.lists(st.sampled_from([0, 0, 16, 512, 4096, 1 << 21]), min_size=len(sizes), max_size=len(sizes))

    def place(base: int, order: Sequence[int], gaps: Sequence[int]) -> tuple[int, ...]:
        addresses = dict.fromkeys(order, 0)
        for index, gap in zip(order, gaps, strict=True):
            base += gap
            addresses[index] = base
            base += sizes[index]
        return tuple(addresses[index] for index in range(len(sizes)))

    first = place(0x7F12_3400_0000, range(len(sizes)), draw(gaps))
    base = draw(st.sampled_from([0x7F12_9000_0000, 0x7F13_3400_0000, 0x7E00_0000_0010]))
    second = place(base, draw(st.permutations(range(len(sizes)))), draw(gaps))
    moves = [b - a for a, b in zip(first, second, strict=True)]
    apart = [index * 32 if moves.count(move) > 1 else 0 for index, move in enumerate(moves)]
    second = tuple(address + shift for address, shift in zip(second, accumulate(apart), strict=True))
    assume(len({b - a for a, b in zip(first, second, strict=True)}) == len(sizes))
    return Layout(
        tuple(sizes), first, second, (0x7F40_0000_0000, draw(st.sampled_from([0x7F40_0000_0000, 0x7F55_AB00_0200])))
    )


@dataclass(frozen=True)
class Field:
    """Bytes of a parameter in the first, the second and the control capture; `origin` (input, delta) of a pointer."""

    first: bytes
    second: bytes
    control: bytes
    alignment: int
    origin: tuple[int, int] | None = None


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


def same(data: bytes, alignment: int) -> Field:
    return Field(data, data, data, alignment)


@st.composite
def pointer_fields(draw: st.DrawFn, layout: Layout) -> Field:
    """Addresses of inputs, one past the end included, aligned to 8 bytes or (packed) to 4."""
    index = draw(st.integers(0, len(layout.sizes) - 1))
    delta = draw(st.sampled_from([0, layout.sizes[index]]) | st.integers(0, layout.sizes[index]))
    first, second = word(layout.first[index] + delta), word(layout.second[index] + delta)
    return Field(first, second, first, draw(st.sampled_from([8, 8, 4])), (index, delta))


@st.composite
def padding_fields(draw: st.DrawFn) -> Field:
    """Return bytes that are not set: others at every capture."""
    size = draw(st.sampled_from([4, 8, 12]))
    content = []
    for _ in range(3):
        content.append(draw(st.binary(min_size=size, max_size=size)))
    first, second, control = (bytearray(data) for data in content)
    for start in range(0, size, 4):
        control[start] = first[start] ^ 0x55
    return Field(bytes(first), bytes(second), bytes(control), 4)


def plain_fields(layout: Layout) -> st.SearchStrategy[Field]:
    """Return what is no address of an input: numbers, weights, intermediates, and numbers that look like addresses."""
    inputs = st.integers(0, len(layout.sizes) - 1)
    lookalike = st.builds(
        lambda index, which, offset: same(word((layout.first, layout.second)[which][index] + offset), 8),
        inputs,
        st.integers(0, 1),
        st.integers(0, 64),
    )
    owned = st.builds(
        lambda offset: Field(word(layout.owned[0] + offset), word(layout.owned[1] + offset), word(layout.owned[0]), 8),
        st.integers(0, OWNED_BYTES - 1),
    )
    static = st.builds(lambda offset: same(word(STATIC_ADDRESS + offset), 8), st.integers(0, 1 << 20))
    numbers = st.builds(same, st.binary(min_size=8, max_size=8), st.just(8))
    halves = st.builds(same, st.binary(min_size=4, max_size=4), st.just(4))
    return lookalike | owned | static | numbers | halves


def join_fields(fields: Sequence[Field]) -> tuple[tuple[bytes, bytes, bytes], list[tuple[int, tuple[int, int]]]]:
    """The parameter's bytes in the three captures, and (byte offset, origin) of each pointer in it."""
    data = (bytearray(), bytearray(), bytearray())
    pointers = []
    for field in fields:
        start = -(-len(data[0]) // field.alignment) * field.alignment
        for target, content in zip(data, (field.first, field.second, field.control), strict=True):
            target.extend(bytes(start - len(target)) + content)
        if field.origin is not None:
            pointers.append((start, field.origin))
    return (bytes(data[0]), bytes(data[1]), bytes(data[2])), pointers


@dataclass(frozen=True)
class Case:
    """Three captures of one graph, and every pointer in it."""

    layout: Layout
    first: Capture
    second: Capture
    control: Capture
    uses: frozenset[PointerUse]


def kernel(parameters: Sequence[bytes], **fields: Any) -> KernelNode:
    """A kernel node with these parameters one after another."""
    offset, records = 0, []
    for data in parameters:
        offset = -(-offset // 8) * 8
        records.append(Parameter(offset=offset, size=len(data), data=data))
        offset += len(data)
    base = KernelNode(
        name="k",
        function=11,
        grid=(1, 1, 1),
        block=(128, 1, 1),
        shared_bytes=0,
        parameters=tuple(records),
    )
    return base.model_copy(update=fields)


Triple = tuple[Node, Node, Node]


def examples(count: int) -> settings:
    """Set the number of examples: `count` with ENCORE_FULL_SWEEP=1, a third without."""
    return settings(max_examples=count if os.environ.get("ENCORE_FULL_SWEEP") == "1" else count // 3, deadline=None)


@st.composite
def cases(draw: st.DrawFn, padding: bool = True, minimum_inputs: int = 1) -> Case:
    """Graphs of kernels, copies, fills and markers over the inputs of a layout."""
    layout = draw(layouts(minimum_inputs))
    plain = plain_fields(layout)
    fields = pointer_fields(layout) | plain
    if padding:
        fields = fields | padding_fields()
    addresses = pointer_fields(layout) | plain.filter(lambda field: len(field.first) == 8)
    uses: set[PointerUse] = set()

    def note(node: int, kind: UseKind, parameter: int, offset: int, origin: tuple[int, int] | None) -> None:
        if origin is not None:
            uses.add(PointerUse(node, parameter, offset, *origin, kind))

    def kernel_nodes(node: int) -> Triple:
        data: tuple[list[bytes], ...] = ([], [], [])
        for number, content in enumerate(draw(st.lists(st.lists(fields, min_size=1, max_size=6), max_size=4))):
            captured, pointers = join_fields(content)
            for target, bytes_ in zip(data, captured, strict=True):
                target.append(bytes_)
            for offset, origin in pointers:
                note(node, UseKind.PARAMETER, number, offset, origin)
        return kernel(data[0]), kernel(data[1]), kernel(data[2])

    def memcpy_nodes(node: int) -> Triple:
        ends = (draw(addresses), draw(addresses))
        memory = draw(st.sampled_from(["device", "unified", "host"]))
        note(node, UseKind.MEMCPY_SOURCE, 0, 0, ends[0].origin if memory != "host" else None)
        note(node, UseKind.MEMCPY_DESTINATION, 0, 0, ends[1].origin)
        nodes = [
            MemcpyNode(
                source=MemcpyEnd(memory=memory, address=int.from_bytes(source, "little")),
                destination=MemcpyEnd(memory="device", address=int.from_bytes(destination, "little")),
                width_bytes=64,
                height=1,
                depth=1,
            )
            for source, destination in zip(
                (ends[0].first, ends[0].second, ends[0].control),
                (ends[1].first, ends[1].second, ends[1].control),
                strict=True,
            )
        ]
        return nodes[0], nodes[1], nodes[2]

    def memset_nodes(node: int) -> Triple:
        field = draw(addresses)
        note(node, UseKind.MEMSET, 0, 0, field.origin)
        nodes = [
            MemsetNode(
                address=int.from_bytes(data, "little"), pitch_bytes=0, value=0, element_bytes=4, width=4, height=1
            )
            for data in (field.first, field.second, field.control)
        ]
        return nodes[0], nodes[1], nodes[2]

    def marker(node: int) -> Triple:
        empty = OtherNode(type_name="EMPTY")
        return empty, empty, empty

    makers = [kernel_nodes, kernel_nodes, kernel_nodes, memcpy_nodes, memset_nodes, marker]
    count = draw(st.integers(1, 8))
    triples = [draw(st.sampled_from(makers))(index) for index in range(count)]
    edges = tuple(Edge(source=index, target=index + 1) for index in range(count - 1))
    graphs = [CapturedGraph(nodes=tuple(nodes), edges=edges) for nodes in zip(*triples, strict=True)]
    return Case(
        layout,
        layout.capture(graphs[0], 0),
        layout.capture(graphs[1], 1),
        layout.capture(graphs[2], 0),
        frozenset(uses),
    )
