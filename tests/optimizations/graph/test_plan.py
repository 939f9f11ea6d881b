"""Patch plans update exactly the pointers of inputs, with any available updaters, unless the whole graph forbids it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from fake_tensor_map import make_tensor_map, replace_address
from hypothesis import given
from hypothesis import strategies as st
from synthetic_captures import Case, cases, examples, kernel, word

from optimizations.graph.plan import (
    AUTO_HOST_NODES,
    Available,
    Choice,
    Plan,
    is_collective_kernel,
    limit,
    make_plan,
)
from optimizations.graph.pointers import Analysis, InputVerdict, PointerUse, ReasonCode, UseKind, find_pointer_uses
from optimizations.graph.records import CapturedGraph, KernelNode, MemcpyEnd, MemcpyNode, MemsetNode, Node

EVERYTHING = Available()
OLD = "the driver is older than 12.4"
WITHOUT_PRELUDE = Available(against_prelude=lambda: OLD)


def buffer(node: KernelNode) -> bytearray:
    """The node's parameters as they lie in its parameter buffer."""
    content = bytearray(max((parameter.offset + parameter.size for parameter in node.parameters), default=0))
    for parameter in node.parameters:
        content[parameter.offset : parameter.offset + parameter.size] = parameter.data
    return content


def write(node: Node, uses: Sequence[PointerUse], address: Mapping[int, int]) -> Node:
    """The node with these uses replaced by the addresses of their inputs."""
    if isinstance(node, KernelNode):
        content = buffer(node)
        for use in uses:
            start = node.parameters[use.parameter].offset + use.byte_offset
            target = address[use.input] + use.delta
            if use.kind is UseKind.TENSOR_MAP:
                replaced = replace_address(bytes(content[start : start + 128]), target)
                assert replaced is not None
                content[start : start + 128] = replaced
            else:
                content[start : start + 8] = word(target)
        return from_buffer(node, content)
    for use in uses:
        target = address[use.input] + use.delta
        if isinstance(node, MemcpyNode):
            end = "source" if use.kind is UseKind.MEMCPY_SOURCE else "destination"
            node = node.model_copy(update={end: getattr(node, end).model_copy(update={"address": target})})
        else:
            assert isinstance(node, MemsetNode)
            node = node.model_copy(update={"address": target})
    return node


def from_buffer(node: KernelNode, content: bytearray) -> KernelNode:
    parameters = tuple(replace(one, data=bytes(content[one.offset : one.offset + one.size])) for one in node.parameters)
    return node.model_copy(update={"parameters": parameters})


def replay(graph: CapturedGraph, plan: Plan, address: Mapping[int, int]) -> dict[int, Node]:
    """Return each node's parameters after a replay of the plan with inputs at these addresses."""
    nodes: dict[int, Node] = dict(enumerate(graph.nodes))
    table = bytearray(sum(slot.size_bytes for slot in plan.slots))
    for one in plan.inputs:
        if one.indirect:
            for slot in (slot for slot in plan.slots if slot.input == one.input):
                content: bytes | None = word(address[slot.input] + slot.delta)
                if slot.tensor_map is not None:
                    content = replace_address(slot.tensor_map, address[slot.input] + slot.delta)
                assert content is not None
                table[slot.offset_bytes : slot.offset_bytes + slot.size_bytes] = content
    for host_node in plan.of(Choice.HOST):
        nodes[host_node.node] = write(nodes[host_node.node], host_node.uses, address)
    for prelude_node in plan.of(Choice.PRELUDE):
        node = nodes[prelude_node.node]
        assert isinstance(node, KernelNode)
        content_ = buffer(node)
        for update in prelude_node.updates:
            start, size = update.slot.offset_bytes, update.slot.size_bytes
            content_[update.buffer_offset : update.buffer_offset + size] = table[start : start + size]
        nodes[prelude_node.node] = from_buffer(node, content_)
    return nodes


def assert_replay_sets_new_addresses(graph: CapturedGraph, analysis: Analysis, plan: Plan) -> None:
    """Check that a replay changes the uses of inputs that are read in place, and nothing else."""
    indirect = {one.input for one in plan.inputs if one.indirect}
    address = {verdict.input: 0x7A00_0000_0000 + (verdict.input << 24) for verdict in analysis.verdicts}
    expected: dict[int, Node] = {}
    for index, node in enumerate(graph.nodes):
        uses = [use for use in analysis.uses if use.node == index and use.input in indirect]
        expected[index] = write(node, uses, address)
    assert replay(graph, plan, address) == expected


@examples(150)
@given(case=cases(), choice=st.sampled_from(Choice), available=st.sampled_from([EVERYTHING, WITHOUT_PRELUDE]))
def test_plan_sets_new_addresses_in_every_node(case: Case, choice: Choice, available: Available) -> None:
    analysis = find_pointer_uses(case.first, case.second, further=[case.control])

    plan = make_plan(case.first.graph, analysis, choice, available)

    assert_replay_sets_new_addresses(case.first.graph, analysis, plan)
    updated = [node.node for node in plan.nodes]
    assert len(set(updated)) == len(updated), "no node has two updaters"
    assert available is EVERYTHING or not plan.slots
    spans = [(slot.offset_bytes, slot.offset_bytes + slot.size_bytes) for slot in plan.slots]
    assert [start for start, _ in spans] == [0, *(end for _, end in spans)][: len(spans)]
    assert sum(slot.size_bytes for slot in plan.slots) == sum(end - start for start, end in spans)
    if choice is Choice.OFF:
        assert not any(one.indirect for one in plan.inputs)
    for verdict, one in zip(analysis.verdicts, plan.inputs, strict=True):
        assert one.input == verdict.input
        assert set(verdict.reasons) <= set(one.reasons)


def analysed(nodes: Sequence[Node], uses: Sequence[PointerUse] = (), inputs: int = 1) -> tuple[CapturedGraph, Analysis]:
    """A graph of these nodes, and an analysis that found these uses of so many inputs."""
    verdicts = tuple(
        InputVerdict(index, tuple(use for use in uses if use.input == index), ()) for index in range(inputs)
    )
    return CapturedGraph(nodes=tuple(nodes), edges=()), Analysis(verdicts, ())


def pointer_kernels(count: int) -> tuple[CapturedGraph, Analysis]:
    """`count` kernels that all take input 0 as their only parameter."""
    return analysed([kernel([word(1)])] * count, [PointerUse(index, 0, 0, 0, 0) for index in range(count)])


def counts(plan: Plan) -> tuple[int, int]:
    """Nodes updated by (host, prelude)."""
    return len(plan.of(Choice.HOST)), len(plan.of(Choice.PRELUDE))


@pytest.mark.parametrize(
    ("choice", "nodes", "expected"),
    [
        (Choice.AUTO, AUTO_HOST_NODES, (AUTO_HOST_NODES, 0)),
        (Choice.AUTO, AUTO_HOST_NODES + 1, (0, AUTO_HOST_NODES + 1)),
        (Choice.HOST, AUTO_HOST_NODES + 1, (AUTO_HOST_NODES + 1, 0)),
        (Choice.PRELUDE, 1, (0, 1)),
    ],
)
def test_nodes_have_the_chosen_updater(choice: Choice, nodes: int, expected: tuple[int, int]) -> None:
    plan = make_plan(*pointer_kernels(nodes), choice, EVERYTHING)
    assert (counts(plan), plan.fallbacks) == (expected, ())


@pytest.mark.parametrize("choice", [Choice.AUTO, Choice.PRELUDE])
def test_host_replaces_the_prelude_with_a_reason(choice: Choice) -> None:
    plan = make_plan(*pointer_kernels(5), choice, WITHOUT_PRELUDE)
    assert counts(plan) == (5, 0)
    assert plan.fallbacks == tuple((index, f"prelude: {OLD}") for index in range(5))


def test_tensor_maps_are_written_whole_through_the_table() -> None:
    first, other = make_tensor_map(512), make_tensor_map(512, shape=9)
    nodes = [kernel([word(5), first]), kernel([first]), kernel([bytes(64) + other])]
    uses = [
        PointerUse(0, 1, 0, 0, 0, UseKind.TENSOR_MAP),
        PointerUse(1, 0, 0, 0, 0, UseKind.TENSOR_MAP),
        PointerUse(2, 0, 64, 0, 0, UseKind.TENSOR_MAP),
    ]
    plan = make_plan(*analysed(nodes, uses), Choice.PRELUDE, EVERYTHING)
    assert [slot.tensor_map for slot in plan.slots] == [first, other], "equal maps share a slot"
    assert sum(slot.size_bytes for slot in plan.slots) == 256
    assert [node.updates[0].buffer_offset for node in plan.of(Choice.PRELUDE)] == [8, 0, 64]


# Reasons that depend on the whole graph, and the alignment of addresses.

END = MemcpyEnd(memory="device", address=4096)


def copy_of(height: int = 1, depth: int = 1) -> MemcpyNode:
    return MemcpyNode(source=END, destination=END, width_bytes=64, height=height, depth=depth)


def codes(analysis: Analysis) -> list[list[ReasonCode]]:
    return [[reason.code for reason in verdict.reasons] for verdict in analysis.verdicts]


def test_aliased_input_is_copied() -> None:
    graph, analysis = analysed([], inputs=2)
    assert codes(limit(analysis, graph, {1})) == [[], [ReasonCode.OUTPUT_ALIAS]]


@pytest.mark.parametrize(("height", "depth", "copied"), [(1, 1, False), (2, 1, True), (1, 3, True)])
def test_input_in_a_copy_of_several_dimensions_is_copied(height: int, depth: int, copied: bool) -> None:
    uses = PointerUse(0, 0, 0, 1, 0, UseKind.MEMCPY_DESTINATION), PointerUse(1, 0, 0, 0, 0)
    graph, analysis = analysed([copy_of(height, depth), kernel([word(1)])], uses, inputs=2)
    assert codes(limit(analysis, graph, ())) == [[], [ReasonCode.NO_UPDATER] if copied else []]


COLLECTIVES = [
    "ncclDevKernel_AllReduce_Sum_f32",
    "_Z39ncclDevKernel_AllReduce_Sum_f32_RING_LL24ncclDevKernelArgsStorageILm4096EE",
    "_Z42ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_f32v",
    "_ZN4c10d16symmetric_memory12_GLOBAL__N_126one_shot_all_reduce_kernelIN3c108BFloat16ELi16ELi8EEEvPPT_",
    "_ZN4c10d16symmetric_memory14barrier_kernelEPPjmiim",
    "_ZN4vllm26cross_device_reduce_1stageI13__nv_bfloat16Li2EEEvNS_8RankDataE",
    "nvshmemi_transfer_put",
    "one_shot_all_reduce_0",
]
OF_ONE_PROCESS = [
    "triton_poi_fused_add_all_reduce_wait_tensor_3",
    "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfEEEEvT1_",
    "_ZN2at6native24vectorized_gather_kernelILi16ElEEvPcS2_",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64",
]


@pytest.mark.parametrize("name", [*COLLECTIVES, *OF_ONE_PROCESS])
def test_collective_kernel_is_known_by_its_name(name: str) -> None:
    assert is_collective_kernel(name) is (name in COLLECTIVES)


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([PointerUse(0, 0, 0, 0, 0)], 16),
        ([PointerUse(1, 0, 0, 0, 0)], 256),
        ([PointerUse(0, 0, 0, 0, 0), PointerUse(1, 0, 0, 0, 0)], 256),
        ([PointerUse(1, 0, 0, 0, 0, UseKind.MEMCPY_SOURCE)], 16),
        ([PointerUse(1, 0, 0, 0, 0, UseKind.MEMSET)], 16),
        ([PointerUse(0, 0, 0, 0, 0, UseKind.TENSOR_MAP)], 32),
    ],
)
def test_library_kernels_keep_the_alignment_they_were_chosen_for(uses: list[PointerUse], expected: int) -> None:
    graph, analysis = analysed([kernel([bytes(128)]), copy_of()], uses)
    plan = make_plan(graph, analysis, Choice.HOST, Available(frozenset({0})))
    assert plan.inputs[0].alignment_bytes == expected
