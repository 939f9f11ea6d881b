"""Pointer uses from two captures are exact, with a reason for each uncertain one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fake_tensor_map import make_hidden_map, replace_hidden_address
from hypothesis import given
from hypothesis import strategies as st
from synthetic_captures import Case, cases, examples, kernel, word

from optimizations.graph.named_uses import find_named_uses
from optimizations.graph.pointers import Analysis, PointerUse, ReasonCode, UnexplainedWord, UseKind, find_pointer_uses
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
    Placeholder,
)

A, B = 0x7F12_3400_0000, 0x7F15_0000_1000
"""Where the first input of a hand-written case lies in the two captures."""


def capture(nodes: Sequence[Node], inputs: Sequence[tuple[int, int]], owned: Sequence[tuple[int, int]] = ()) -> Capture:
    """A capture of these nodes with inputs, and own memory, at (address, size)."""
    return Capture(
        graph=CapturedGraph(nodes=tuple(nodes), edges=()),
        placeholders=tuple(
            Placeholder(input=index, memory=MemoryRange(address=address, size_bytes=size))
            for index, (address, size) in enumerate(inputs)
        ),
        owned=tuple(MemoryRange(address=address, size_bytes=size) for address, size in owned),
    )


def codes(analysis: Analysis) -> list[set[ReasonCode]]:
    """The reasons of each input."""
    return [{reason.code for reason in verdict.reasons} for verdict in analysis.verdicts]


def with_kernel(one: Capture, content: bytes) -> Capture:
    """The capture with one more kernel, whose parameter has this content."""
    nodes = (*one.graph.nodes, kernel([content]))
    return one.model_copy(update={"graph": CapturedGraph(nodes=nodes, edges=one.graph.edges)})


def inverted(content: bytes) -> bytes:
    return bytes(byte ^ 0x55 for byte in content)


@examples(300)
@given(case=cases())
def test_exactly_the_pointers_are_found(case: Case) -> None:
    analysis = find_pointer_uses(case.first, case.second, further=[case.control])
    assert set(analysis.uses) == case.uses
    assert analysis.unexplained == ()
    used = {use.input for use in case.uses}
    for verdict in analysis.verdicts:
        expected = set()
        if case.layout.sizes[verdict.input] == 0:
            expected.add(ReasonCode.EMPTY)
        if verdict.input not in used:
            expected.add(ReasonCode.NO_USE)
        assert {reason.code for reason in verdict.reasons} == expected
        assert verdict.indirect == (not expected)


@examples(200)
@given(case=cases())
def test_padding_without_a_control_capture_is_unexplained(case: Case) -> None:
    analysis = find_pointer_uses(case.first, case.second)
    assert set(analysis.uses) == case.uses
    assert all((ReasonCode.UNEXPLAINED in found) == bool(analysis.unexplained) for found in codes(analysis))


@examples(100)
@given(case=cases(minimum_inputs=2), index=st.integers(0, 1), shift=st.integers(1, 12))
def test_value_computed_from_an_address_copies_every_input(case: Case, index: int, shift: int) -> None:
    values = [addresses[index] >> shift for addresses in (case.layout.first, case.layout.second)]
    contents = map(word, (*values, values[0]))
    first, second, control = map(with_kernel, (case.first, case.second, case.control), contents)
    analysis = find_pointer_uses(first, second, further=[control])
    assert analysis.unexplained == (UnexplainedWord(len(first.graph.nodes) - 1, 0, 0),)
    assert all(ReasonCode.UNEXPLAINED in found for found in codes(analysis))
    assert set(analysis.uses) == case.uses


def test_integer_that_looks_like_an_address_is_no_pointer() -> None:
    nodes = [kernel([word(A + 8), word(B + 8)])]
    analysis = find_pointer_uses(capture(nodes, [(A, 64)]), capture(nodes, [(B, 64)]))
    assert codes(analysis) == [{ReasonCode.NO_USE}]


def test_address_past_the_end_belongs_to_the_input_it_moved_with() -> None:
    first = capture([kernel([word(A + 64), word(A + 64)])], [(A, 64), (A + 64, 32)])
    second = capture([kernel([word(B + 64), word(B + 4096)])], [(B, 64), (B + 4096, 32)])
    analysis = find_pointer_uses(first, second)
    assert analysis.uses == (
        PointerUse(0, 0, 0, 0, 64),
        PointerUse(0, 1, 0, 1, 0),
    )
    assert codes(analysis) == [set(), set()]


def test_inputs_that_overlap_and_move_together_are_copied() -> None:
    first = capture([kernel([word(A + 32)])], [(A, 64), (A + 16, 64)])
    second = capture([kernel([word(B + 32)])], [(B, 64), (B + 16, 64)])
    analysis = find_pointer_uses(first, second)
    assert codes(analysis) == [{ReasonCode.SAME_DISPLACEMENT}] * 2
    assert {(use.input, use.delta) for use in analysis.uses} == {(0, 32), (1, 16)}
    assert "input 1" in analysis.verdicts[0].reasons[0].message


def test_input_that_did_not_move_is_copied() -> None:
    first = capture([kernel([word(A), word(A + 512)])], [(A, 64), (A + 512, 64)])
    second = capture([kernel([word(A), word(B)])], [(A, 64), (B, 64)])
    assert codes(find_pointer_uses(first, second)) == [{ReasonCode.NOT_MOVED, ReasonCode.NO_USE}, set()]


def test_address_before_an_input_copies_that_input_only() -> None:
    first = capture([kernel([word(A - 8), word(A + 512)])], [(A, 64), (A + 512, 64)])
    second = capture([kernel([word(B - 8), word(B + 4096)])], [(B, 64), (B + 4096, 64)])
    analysis = find_pointer_uses(first, second)
    assert codes(analysis) == [{ReasonCode.OUTSIDE, ReasonCode.NO_USE}, set()]
    assert "-8 bytes from its start" in analysis.verdicts[0].reasons[0].message


def test_halves_of_neighbouring_pointers_are_no_pointer() -> None:
    """The word between the two reads as an address of input 2, in both captures and at the same offset."""
    places = [0x7F12_3400_0000, 0x7F13_0000_1000], [0x7F12_9000_0000, 0x7F13_0000_2000]
    between = [int.from_bytes((word(one) + word(other))[4:12], "little") - 16 for one, other in places]
    captures = [
        capture([kernel([word(one) + word(other)])], [(one, 64), (other, 64), (third, 64)])
        for (one, other), third in zip(places, between, strict=True)
    ]
    analysis = find_pointer_uses(*captures)
    assert [(use.byte_offset, use.input) for use in analysis.uses] == [(0, 0), (8, 1)]
    assert codes(analysis) == [set(), set(), {ReasonCode.NO_USE}]


def test_half_an_address_stored_alone_is_unexplained() -> None:
    first = capture([kernel([word(A)[:4], word(A)])], [(A, 64)])
    second = capture([kernel([word(B)[:4], word(B)])], [(B, 64)])
    analysis = find_pointer_uses(first, second, further=[first])
    assert codes(analysis) == [{ReasonCode.UNEXPLAINED}]
    assert analysis.unexplained == (UnexplainedWord(0, 0, 0),)


def test_half_an_address_next_to_a_value_is_padding() -> None:
    """cuDNN's kernels leave the lower half of a pointer, and write 1.0 over the upper half."""
    one = (0x3F80_0000).to_bytes(4, "little")
    first = capture([kernel([word(A + 8), bytes(8) + word(A + 8)[:4] + one])], [(A, 64)])
    second = capture([kernel([word(B + 8), bytes(8) + word(B + 8)[:4] + one])], [(B, 64)])
    analysis = find_pointer_uses(first, second)
    assert codes(analysis) == [set()]
    assert analysis.uses == (PointerUse(0, 0, 0, 0, 8),)
    elsewhere = capture([kernel([word(B + 8), bytes(8) + word(B + 12)[:4] + one])], [(B, 64)])
    assert find_pointer_uses(first, elsewhere).doubtful, "half of no address that the graph holds"
    # Another address that has the same lower half is an address all the same.
    beyond = [capture([kernel([word(one + 8), word(one + 8 + 2**32)])], [(one, 64)]) for one in (A, B)]
    assert codes(find_pointer_uses(*beyond)) == [{ReasonCode.OUTSIDE}]


@examples(100)
@given(case=cases(), content=st.binary(min_size=4, max_size=4))
def test_repeated_capture_identifies_padding(case: Case, content: bytes) -> None:
    """Bytes that happened to be the same in the first capture and its control."""
    first, control = (with_kernel(one, bytes(12)) for one in (case.first, case.control))
    second, repeat = (with_kernel(case.second, bytes(8) + one) for one in (content, inverted(content)))
    assert find_pointer_uses(first, second, further=[control]).doubtful == (content != bytes(4))
    analysis = find_pointer_uses(first, second, further=[control, repeat])
    assert not analysis.doubtful
    assert set(analysis.uses) == case.uses
    assert find_pointer_uses(first, second, further=[control, second]).doubtful == (content != bytes(4))


@examples(100)
@given(case=cases(), content=st.binary(min_size=4, max_size=4), moves=st.booleans())
def test_bytes_unchanged_by_a_third_move_are_no_address(case: Case, content: bytes, moves: bool) -> None:
    """Stack bytes may repeat whenever the same work is captured, and differ between two addresses."""
    first, control = (with_kernel(one, bytes(12)) for one in (case.first, case.control))
    again = inverted(content) if moves else content
    second, third = (with_kernel(case.second, bytes(8) + one) for one in (content, again))
    placeholders = [
        one.model_copy(update={"memory": one.memory.model_copy(update={"address": one.memory.address + 4096})})
        for one in second.placeholders
    ]
    third = third.model_copy(update={"placeholders": tuple(placeholders)})
    assert find_pointer_uses(first, second, further=[control, second]).doubtful == (content != bytes(4))
    analysis = find_pointer_uses(first, second, further=[control, second, third])
    assert analysis.doubtful == (moves and content != bytes(4))
    assert set(analysis.uses) == case.uses


def test_address_of_a_possible_intermediate_copies_its_input() -> None:
    first = capture([kernel([word(A + 64)])], [(A, 64)], owned=[(A + 64, 4096)])
    second = capture([kernel([word(B + 64)])], [(B, 64)], owned=[(B + 64, 4096)])
    assert codes(find_pointer_uses(first, second)) == [{ReasonCode.AMBIGUOUS}]


@pytest.mark.parametrize(("type_name", "opaque"), [("HOST", True), ("GRAPH", True), ("EVENT_RECORD", False)])
def test_unreadable_nodes_copy_every_input(type_name: str, opaque: bool) -> None:
    first = capture([kernel([word(A)]), OtherNode(type_name=type_name)], [(A, 64)])
    second = capture([kernel([word(B)]), OtherNode(type_name=type_name)], [(B, 64)])
    analysis = find_pointer_uses(first, second)
    assert codes(analysis) == [{ReasonCode.OPAQUE_NODE} if opaque else set()]
    if opaque:
        assert f"node 1 is of type {type_name}" in analysis.verdicts[0].reasons[0].message


def copy_node(**fields: Any) -> MemcpyNode:
    end = MemcpyEnd(memory="device", address=STATIC)
    return MemcpyNode(source=end, destination=end, width_bytes=4, height=1, depth=1).model_copy(update=fields)


STATIC = 0x7F77_0000_0000
FILL = MemsetNode(address=STATIC, pitch_bytes=0, value=0, element_bytes=4, width=4, height=1)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ([kernel([])], [kernel([]), kernel([])], "2 nodes in one capture and 3 in the other"),
        ([kernel([])], [OtherNode(type_name="EMPTY")], "node 1 is a kernel node in one capture and a other node"),
        ([kernel([])], [kernel([], function=12)], "differs in function: 11 and 12"),
        ([kernel([])], [kernel([], name="other")], "differs in name"),
        ([kernel([])], [kernel([], grid=(2, 1, 1))], "differs in grid"),
        ([kernel([])], [kernel([], shared_bytes=16)], "differs in shared_bytes"),
        ([kernel([b"1"])], [kernel([b"12"])], "differs in parameter layout"),
        ([copy_node()], [copy_node(width_bytes=8)], "differs in width_bytes"),
        ([copy_node()], [copy_node(source=MemcpyEnd(memory="host", address=1))], "differs in source"),
        ([FILL], [FILL.model_copy(update={"value": 1})], "differs in value"),
        ([OtherNode(type_name="EMPTY")], [OtherNode(type_name="HOST")], "differs in type_name"),
    ],
)
def test_captures_of_different_work_copy_every_input(one: list[Node], other: list[Node], said: str) -> None:
    first = capture([kernel([word(A)]), *one], [(A, 64)])
    second = capture([kernel([word(B)]), *other], [(B, 64)])
    analysis = find_pointer_uses(first, second)
    assert codes(analysis) == [{ReasonCode.GRAPHS_DIFFER}]
    assert said in analysis.verdicts[0].reasons[0].message
    assert analysis.uses == ()


def test_captures_with_other_dependencies_copy_every_input() -> None:
    nodes = (kernel([word(A)]), kernel([]))
    first = capture(nodes, [(A, 64)])
    graph = CapturedGraph(nodes=(kernel([word(B)]), kernel([])), edges=(Edge(source=0, target=1),))
    second = capture([], [(B, 64)]).model_copy(update={"graph": graph})
    analysis = find_pointer_uses(first, second)
    assert codes(analysis) == [{ReasonCode.GRAPHS_DIFFER}]
    assert "dependencies" in analysis.verdicts[0].reasons[0].message


def test_control_capture_of_different_work_copies_every_input() -> None:
    first, second = capture([kernel([word(A)])], [(A, 64)]), capture([kernel([word(B)])], [(B, 64)])
    control = capture([kernel([word(A)], grid=(9, 1, 1))], [(A, 64)])
    assert codes(find_pointer_uses(first, second, further=[control])) == [{ReasonCode.GRAPHS_DIFFER}]


def test_captures_that_cannot_be_compared_are_refused() -> None:
    first = capture([], [(A, 64)])
    with pytest.raises(ValueError, match=r"placeholders for inputs \[0\] and \[0, 1\]"):
        find_pointer_uses(first, capture([], [(B, 64), (A, 8)]))
    with pytest.raises(ValueError, match="input 0 has 64 bytes in one capture and 32 in the other"):
        find_pointer_uses(first, capture([], [(B, 32)]))
    both = [capture([], [(one, 64), (other, 64)]) for one, other in ((A, B), (B, A), (B, A + 4096))]
    with pytest.raises(ValueError, match="some of its placeholders at their addresses in the second"):
        find_pointer_uses(both[0], both[1], further=both[2:])


def test_tensor_maps_in_structs_and_words_next_to_them_are_uses() -> None:
    def struct(a: int, b: int) -> bytes:
        return word(3) * 8 + make_hidden_map(a + 64) + make_hidden_map(b) + word(a) + word(9)

    inputs = [(A, 4096), (A + 8192, 4096)], [(B, 4096), (B + 65536, 4096)]
    first = capture([kernel([word(1), struct(A, A + 8192)])], inputs[0])
    second = capture([kernel([word(1), struct(B, B + 65536)])], inputs[1])
    blind = find_pointer_uses(first, second)
    assert codes(blind) == [{ReasonCode.UNEXPLAINED}, {ReasonCode.UNEXPLAINED, ReasonCode.NO_USE}]

    # An offset into an input is proven only where a plain word of the window names it, which this encoding hides.
    assert ReasonCode.UNEXPLAINED in codes(find_pointer_uses(first, second, replace_address=replace_hidden_address))[1]

    def at_start(a: int, b: int) -> bytes:
        return word(3) * 8 + make_hidden_map(a) + make_hidden_map(b) + word(a) + word(9)

    first = capture([kernel([word(1), at_start(A, A + 8192)])], inputs[0])
    second = capture([kernel([word(1), at_start(B, B + 65536)])], inputs[1])
    analysis = find_pointer_uses(first, second, replace_address=replace_hidden_address)
    assert analysis.uses == (
        PointerUse(0, 1, 64, 0, 0, UseKind.TENSOR_MAP),
        PointerUse(0, 1, 192, 1, 0, UseKind.TENSOR_MAP),
        PointerUse(0, 1, 320, 0, 0),
    )
    assert codes(analysis) == [set(), set()]


# Addresses of inputs in one capture are found by the launches in the generated code.


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
