"""Addresses of inputs in one capture are found by the launches in the generated code."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_captures import kernel, word

from optimizations.graph.named_uses import find_named_uses
from optimizations.graph.pointers import Analysis, PointerUse, ReasonCode
from optimizations.graph.records import (
    Capture,
    CapturedGraph,
    Edge,
    KernelNode,
    MemoryRange,
    Node,
    OtherNode,
    Placeholder,
)

X, Y, OUT = 0x7F12_3400_0000, 0x7F12_3400_1000, 0x7F40_0000_0000
SIZE = 256


def launch(name: str, *addresses: int) -> KernelNode:
    return kernel([*map(word, addresses), (64).to_bytes(4, "little")], name=name)


def find(
    nodes: Sequence[Node], launches: Sequence[tuple[str, Sequence[int]]], named: Sequence[int] = (0, 1)
) -> Analysis:
    chain = tuple(Edge(source=index, target=index + 1) for index in range(len(nodes) - 1))
    memory = {0: X, 1: Y}
    placeholders = tuple(
        Placeholder(input=index, memory=MemoryRange(address=address, size_bytes=SIZE))
        for index, address in memory.items()
    )
    capture = Capture(graph=CapturedGraph(nodes=tuple(nodes), edges=chain), placeholders=placeholders)
    triton = {index for index, node in enumerate(nodes) if isinstance(node, KernelNode) and node.name != "nccl"}
    return find_named_uses(capture, launches, named, triton, "it is not named")


def test_named_launches_are_found_next_to_unreadable_nodes() -> None:
    nodes = [launch("a", X, OUT), launch("nccl", OUT), OtherNode(type_name="HOST"), launch("b", Y, X, X, OUT)]
    x, y = find(nodes, [("a", [0]), ("b", [1, 0, 0])]).verdicts
    assert x.uses == (PointerUse(0, 0, 0, 0, 0), PointerUse(3, 1, 0, 0, 0), PointerUse(3, 2, 0, 0, 0))
    assert y.uses == (PointerUse(3, 0, 0, 1, 0),)
    assert x.indirect and y.indirect


def test_intermediate_in_memory_of_a_dead_input_is_left_alone() -> None:
    """The second kernel writes where x was, and the third, of the same name as the first, reads it."""
    nodes = [launch("a", X, OUT), launch("b", OUT, X), launch("a", X, OUT)]
    x, _ = find(nodes, [("a", [0]), ("b", []), ("a", [])]).verdicts
    assert x.uses == (PointerUse(0, 0, 0, 0, 0),)
    assert x.indirect


@pytest.mark.parametrize(
    "nodes",
    [
        [launch("a", X, OUT)],
        [launch("a", X, OUT), launch("c", X, OUT)],
        [launch("a", X, OUT), launch("b", X, OUT), launch("b", X, OUT)],
        [launch("b", X, OUT), launch("a", X, OUT)],
    ],
)
def test_unknown_kernels_are_not_evidence(nodes: list[Node]) -> None:
    x, _ = find(nodes, [("a", [0]), ("b", [0])]).verdicts
    assert (x.uses, x.reasons[0].code) == ((), ReasonCode.UNEXPLAINED)


@pytest.mark.parametrize(
    "node",
    [
        launch("a", OUT, OUT),
        launch("a", X, X),
        launch("a", X + 16, OUT),
        kernel([word(X) + word(OUT)], name="a"),
        kernel([b"\0" * 4 + word(X)], name="a"),
    ],
)
def test_launch_without_its_argument_is_not_evidence(node: Node) -> None:
    x, _ = find([node], [("a", [0])]).verdicts
    assert (x.uses, x.reasons[0].code) == ((), ReasonCode.UNEXPLAINED)


def test_nodes_listed_out_of_order_are_not_evidence() -> None:
    graph = CapturedGraph(nodes=(launch("a", X, OUT), launch("a", X, OUT)), edges=(Edge(source=1, target=0),))
    placeholder = Placeholder(input=0, memory=MemoryRange(address=X, size_bytes=SIZE))
    capture = Capture(graph=graph, placeholders=(placeholder,))
    (x,) = find_named_uses(capture, [("a", [0]), ("a", [])], {0}, {0, 1}, "").verdicts
    assert (x.uses, x.reasons[0].code) == ((), ReasonCode.UNEXPLAINED)


def test_unknown_or_unused_inputs_are_copied_with_a_reason() -> None:
    x, y = find([launch("a", X, OUT)], [("a", [0])], named=[1]).verdicts
    assert (x.reasons[0].code, x.reasons[0].message) == (ReasonCode.UNPROVEN, "it is not named")
    assert y.reasons[0].code is ReasonCode.NO_USE


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.sampled_from([0, 1, None]), max_size=4)), max_size=6))
def test_every_use_is_found_at_its_argument(launches: list[tuple[str, list[int | None]]]) -> None:
    address = {0: X, 1: Y, None: OUT}
    nodes = [launch(name, *(address[one] for one in passed)) for name, passed in launches]
    analysis = find(nodes, [(name, [one for one in passed if one is not None]) for name, passed in launches])
    for verdict in analysis.verdicts:
        expected = {
            (index, place)
            for index, (_, passed) in enumerate(launches)
            for place, one in enumerate(passed)
            if one == verdict.input
        }
        assert {(use.node, use.parameter) for use in verdict.uses} == expected
        assert verdict.indirect is bool(expected)
