"""Reasons that depend on the whole graph prevent in-place reading, and addresses need an alignment."""

from __future__ import annotations

import pytest

from optimizations.graph.plan import (
    ALIGNMENT_BYTES,
    LIBRARY_ALIGNMENT_BYTES,
    TENSOR_MAP_ALIGNMENT_BYTES,
    Available,
    Choice,
    is_collective_kernel,
    limit,
    make_plan,
)
from optimizations.graph.pointers import Analysis, InputVerdict, PointerUse, ReasonCode, UseKind
from optimizations.graph.records import CapturedGraph, MemcpyEnd, MemcpyNode, Node
from tests.optimizations.graph.test_plan import kernel, word

END = MemcpyEnd(memory="device", address=4096)


def copy_of(height: int = 1, depth: int = 1) -> MemcpyNode:
    return MemcpyNode(source=END, destination=END, width_bytes=64, height=height, depth=depth)


def graph_of(*nodes: Node) -> CapturedGraph:
    return CapturedGraph(nodes=nodes, edges=())


def analysis_of(*uses: PointerUse, inputs: int = 2) -> Analysis:
    return Analysis(
        tuple(InputVerdict(index, tuple(use for use in uses if use.input == index), ()) for index in range(inputs)), ()
    )


def codes(analysis: Analysis) -> list[list[ReasonCode]]:
    return [[reason.code for reason in verdict.reasons] for verdict in analysis.verdicts]


def test_aliased_input_is_copied() -> None:
    assert codes(limit(analysis_of(), graph_of(), {1})) == [[], [ReasonCode.OUTPUT_ALIAS]]


@pytest.mark.parametrize(("height", "depth", "copied"), [(1, 1, False), (2, 1, True), (1, 3, True)])
def test_input_in_a_copy_of_several_dimensions_is_copied(height: int, depth: int, copied: bool) -> None:
    uses = PointerUse(0, 0, 0, 1, 0, UseKind.MEMCPY_DESTINATION), PointerUse(1, 0, 0, 0, 0)
    found = limit(analysis_of(*uses), graph_of(copy_of(height, depth), kernel([word(1)])), ())
    assert codes(found) == [[], [ReasonCode.NO_UPDATER] if copied else []]


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_f32",
        "_Z39ncclDevKernel_AllReduce_Sum_f32_RING_LL24ncclDevKernelArgsStorageILm4096EE",
        "_Z42ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_f32v",
        "_ZN4c10d16symmetric_memory12_GLOBAL__N_126one_shot_all_reduce_kernelIN3c108BFloat16ELi16ELi8EEEvPPT_",
        "_ZN4c10d16symmetric_memory14barrier_kernelEPPjmiim",
        "_ZN4vllm26cross_device_reduce_1stageI13__nv_bfloat16Li2EEEvPNS_8RankDataE",
        "nvshmemi_transfer_put",
        "one_shot_all_reduce_0",
    ],
)
def test_collective_kernel_is_known_by_its_name(name: str) -> None:
    assert is_collective_kernel(name)


@pytest.mark.parametrize(
    "name",
    [
        "triton_poi_fused_add_all_reduce_wait_tensor_3",
        "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfEEEEvT1_",
        "_ZN2at6native24vectorized_gather_kernelILi16ElEEvPcS2_",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64",
    ],
)
def test_kernels_of_one_process_are_no_collectives(name: str) -> None:
    assert not is_collective_kernel(name)


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([PointerUse(0, 0, 0, 0, 0)], ALIGNMENT_BYTES),
        ([PointerUse(1, 0, 0, 0, 0)], LIBRARY_ALIGNMENT_BYTES),
        ([PointerUse(0, 0, 0, 0, 0), PointerUse(1, 0, 0, 0, 0)], LIBRARY_ALIGNMENT_BYTES),
        ([PointerUse(1, 0, 0, 0, 0, UseKind.MEMCPY_SOURCE)], ALIGNMENT_BYTES),
        ([PointerUse(1, 0, 0, 0, 0, UseKind.MEMSET)], ALIGNMENT_BYTES),
        ([PointerUse(0, 0, 0, 0, 0, UseKind.TENSOR_MAP)], TENSOR_MAP_ALIGNMENT_BYTES),
    ],
)
def test_library_kernels_keep_the_alignment_they_were_chosen_for(uses: list[PointerUse], expected: int) -> None:
    graph = graph_of(kernel([bytes(128)]), copy_of())
    plan = make_plan(graph, analysis_of(*uses, inputs=1), Choice.HOST, Available(frozenset({0})))
    assert plan.inputs[0].alignment_bytes == expected
