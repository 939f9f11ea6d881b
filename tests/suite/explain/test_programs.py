"""Explain reports the obstacle of each small program, from FX graphs and offline lowering for an H100.

All programs are captured once, in one process of their own (`explain_seen`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from explain_programs import WIDTH
from explain_seen import Seen, at, captured

from optimizations.report import Copy, CpuNode

NAMES = (
    "mask_attribute",
    "cpu_autocast",
    "numpy_scalar",
    "staged_argument",
    "cpu_output",
    "cpu_index",
    "mutated_cpu_state",
    "constructor_chain",
    "lengths_read_by_host",
    "weight_read_by_host",
    "mutated_input",
    "dropout",
    "attention_bf16",
    "attention_bf16_masked",
    "attention_bf16_permuted_mask",
    "attention_fp32",
    "attention_fp64",
    "device_constant",
    "gradient_in_forward",
    "raises",
    "repeats",
)
BATCH = 8
FLOAT_BYTES = 4


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return captured(NAMES, tmp_path_factory.mktemp("explain"))


@pytest.fixture
def seen(request: pytest.FixtureRequest, answers: dict[str, Any]) -> Seen:
    """Return the program of a test: its name between `test_` and `__`."""
    name = request.function.__name__.removeprefix("test_").partition("__")[0]
    return Seen(answers["programs"][name])


def kinds(nodes: list[CpuNode]) -> list[str]:
    return [node.kind for node in nodes]


def only(copies: list[Copy]) -> Copy:
    (copy,) = copies
    return copy


def test_mask_attribute__is_an_attribute_copied_in_each_call(seen: Seen) -> None:
    (node,) = seen.graph.placement.cpu_nodes_before
    assert (node.kind, node.operation, node.shape, node.dtype) == ("attribute", "self.mask", (BATCH, WIDTH), "float32")
    copy = only(seen.graph.placement.copies_before)
    assert (copy.kind, copy.blocking, copy.copied_bytes) == ("copy", True, BATCH * WIDTH * FLOAT_BYTES)
    for line in (node.source_line, copy.source_line):
        assert line is not None
        assert line.startswith(at("self.mask.to(x.device)"))


def test_mask_attribute__is_split_off_or_blocks(seen: Seen) -> None:
    assert (seen.stock.partitions, seen.stock.kernels_in_graphs, seen.stock.kernels_outside) == (1, 2, 0)
    assert (seen.unpartitioned.partitions, seen.unpartitioned.kernels_in_graphs) == (0, 0)
    assert seen.unpartitioned.kernels_outside == 2
    for lowering, reason in ((seen.stock, "DeviceCopy"), (seen.unpartitioned, "cpu device")):
        assert (lowering.host_to_device_copies, lowering.blocking_copies) == (1, 1)
        (why,) = lowering.not_captured
        assert reason in why.reason
        assert why.source_line is not None
        assert why.source_line.startswith(at("self.mask.to(x.device)"))
    assert seen.graph.stock_captures is True


def test_cpu_autocast__is_not_analysed_and_says_so(seen: Seen) -> None:
    assert (seen.graph.placement.cpu_nodes_before, seen.graph.placement.copies_before) == ((), ())
    (limit,) = (limit for limit in seen.limits if "where its values live is not known" in limit)
    assert limit.endswith("the graph switches autocast on the CPU on and off")


def test_numpy_scalar__is_passed_by_value_or_moved(seen: Seen) -> None:
    (node,) = seen.graph.placement.cpu_nodes_before
    assert (node.kind, node.operation, node.shape, node.dtype) == ("attribute", "self.temperature", (), "float64")
    copy = only(seen.graph.placement.copies_before)
    assert (copy.kind, copy.blocking, copy.copied_bytes) == ("scalar", False, 8)
    assert (seen.stock.cpu_kernels, seen.stock.host_to_device_copies, seen.stock.blocking_copies) == (1, 1, 0)
    assert (seen.stock.partitions, seen.stock.kernels_outside) == (1, 0)
    assert (seen.unpartitioned.partitions, seen.unpartitioned.kernels_outside) == (0, 2)
    assert seen.graph.stock_captures is False, "the scalars are packed by a CPU kernel"


def test_staged_argument__comes_with_each_call(seen: Seen) -> None:
    (node,) = seen.graph.placement.cpu_nodes_before
    assert (node.kind, node.operation) == ("argument", "x")
    copy = only(seen.graph.placement.copies_before)
    assert (copy.kind, copy.blocking, copy.copied_bytes) == ("copy", True, BATCH * WIDTH * FLOAT_BYTES)
    assert seen.graph.non_static_inputs == []
    assert seen.stock.blocking_copies == 1


def test_gradient_in_forward__is_not_lowered(seen: Seen) -> None:
    assert (seen.failure, seen.graph.lowerings, seen.graph.stock_captures) == (None, [], None)
    assert any(limit.startswith("graph 0 was not lowered for graph: gradients inside") for limit in seen.limits)


def test_cpu_output__is_listed_after_its_operands(seen: Seen) -> None:
    assert kinds(seen.graph.placement.cpu_nodes_before) == ["attribute", "computed"]
    assert seen.graph.placement.copies_before == ()
    assert (seen.stock.partitions, seen.stock.kernels_in_graphs, seen.stock.cpu_kernels) == (1, 1, 1)
    assert seen.unpartitioned.partitions == 0
    assert seen.graph.stock_captures is False


def test_cpu_index__is_copied_by_the_indexing(seen: Seen) -> None:
    copy = only(seen.graph.placement.copies_before)
    assert (copy.kind, copy.blocking, copy.copied_bytes) == ("implicit", True, 3 * 8)
    assert seen.graph.stock_captures is None
    (limit,) = (limit for limit in seen.limits if "CPU tensor" in limit)
    assert at("[self.rows]") in limit


def test_mutated_cpu_state__stays_on_the_cpu(seen: Seen) -> None:
    assert kinds(seen.graph.placement.cpu_nodes_before) == ["attribute", "computed"]
    assert (seen.stock.partitions, seen.stock.kernels_in_graphs, seen.stock.cpu_kernels) == (1, 1, 1)
    (why,) = seen.stock.not_captured
    assert why.reason == "cpu ops"
    assert why.source_line is not None
    assert why.source_line.startswith(at("self.calls.add_(1)"))


def test_constructor_chain__is_moved_to_the_gpu_by_stock(seen: Seen) -> None:
    assert kinds(seen.graph.placement.cpu_nodes_before) == ["constant", "computed", "computed"]
    assert only(seen.graph.placement.copies_before).copied_bytes == WIDTH * FLOAT_BYTES
    for lowering in (seen.stock, seen.unpartitioned):
        assert (lowering.partitions, lowering.host_to_device_copies, lowering.cpu_kernels) == (1, 0, 0)


def test_lengths_read_by_host__break_the_graph(seen: Seen) -> None:
    assert seen.failure is None
    assert len(seen.graphs) == 2
    reasons = Counter(each["reason"].partition(";")[0] for each in seen.breaks)
    assert any("item()" in reason for reason in reasons)
    assert reasons["Dynamic shape operator"] == 1
    left = [each for each in seen.breaks if "mask itself runs without graphs" in each["reason"]]
    assert [each["source_line"].startswith(at("lengths[row] :] = 0")) for each in left] == [True]
    assert not any("comes after it is not seen" in limit for limit in seen.limits)


def test_weight_read_by_host__ends_the_analysis(seen: Seen) -> None:
    assert seen.graph.stock_captures is True
    (limit,) = (limit for limit in seen.limits if "comes after it is not seen" in limit)
    assert at("if y.sum() > 0:") in limit


def test_mutated_input__keeps_its_graph_from_being_recorded(seen: Seen) -> None:
    for lowering in (seen.stock, seen.unpartitioned):
        assert (lowering.partitions, lowering.kernels_in_graphs, lowering.kernels_outside) == (0, 0, 1)
        (why,) = lowering.not_captured
        assert "mutated inputs" in why.reason
        assert why.source_line is not None
        assert why.source_line.startswith(at("x.add_(1)"))
    assert seen.graph.stock_captures is False


def test_dropout__draws_its_numbers_inside_the_graph(seen: Seen) -> None:
    assert (seen.stock.partitions, seen.stock.kernels_outside, seen.stock.cpu_kernels) == (1, 0, 0)
    assert seen.stock.kernels_in_graphs >= 2
    assert "philox" in seen.source or "tl.rand" in seen.source or "inductor_seeds" in seen.source


@pytest.mark.parametrize(
    ("name", "launches"), [("attention_bf16", 1), ("attention_bf16_masked", 2), ("attention_fp32", 1)]
)
def test_attention_is_one_kernel_marked_as_assumed(answers: dict[str, Any], name: str, launches: int) -> None:
    seen = Seen(answers["programs"][name])
    assert "torch.ops.aten._scaled_dot_product_efficient_attention.default(" in seen.source
    assert seen.stock.kernels_in_graphs == launches
    assert any("fused kernel" in limit for limit in seen.limits)


@pytest.mark.parametrize("name", ["attention_bf16_permuted_mask", "attention_fp64"])
def test_attention_has_no_fused_kernel_for_this_mask_and_dtype(answers: dict[str, Any], name: str) -> None:
    seen = Seen(answers["programs"][name])
    assert "torch.ops.aten._scaled_dot_product_" not in seen.source
    assert seen.source.count("extern_kernels.bmm(") == 2
    assert not any("fused kernel" in limit for limit in seen.limits)


def test_raises__keeps_earlier_findings(seen: Seen) -> None:
    assert seen.failure == "ArithmeticError('no such number')"
    assert len(seen.graphs) == 1


def test_repeats__is_counted_once_with_its_repetitions(seen: Seen) -> None:
    assert seen.failure is None and len(seen.graphs) == 2
    assert [limit for limit in seen.limits if "counted once" in limit] == [
        "graph 0 runs 3 times in the call, and is counted once",
        "graph 1 runs 3 times in the call, and is counted once",
    ]


# After placement: the setting "placement", and what the graph's record says of it.


@pytest.mark.parametrize("name", ["mask_attribute", "numpy_scalar", "cpu_index", "constructor_chain"])
def test_placement_leaves_one_cuda_graph_and_no_copy_per_call(answers: dict[str, Any], name: str) -> None:
    seen = Seen(answers["programs"][name])
    after, lowered = seen.graph.placement, seen.lowering("placement")
    assert (after.untouched, after.cpu_nodes_after, after.left) == (None, (), ())
    assert {copy.kind for copy in after.copies_after} <= {"scalar"}
    assert (lowered.partitions, lowered.kernels_outside, lowered.cpu_kernels) == (1, 0, 0)
    assert lowered.host_to_device_copies == 0
    assert lowered.kernels_in_graphs >= 1


def test_mask_attribute__is_kept_on_the_gpu_by_placement(seen: Seen) -> None:
    (value,) = seen.graph.placement.hoisted
    assert (value.form, value.hoisted_bytes) == ("kept", BATCH * WIDTH * FLOAT_BYTES)
    assert value.source_line is not None
    assert value.source_line.startswith(at("self.mask.to(x.device)"))
    assert seen.stock.blocking_copies == 1, "what there is to gain"


def test_staged_argument__is_moved_by_one_copy(seen: Seen) -> None:
    assert len(seen.graph.placement.staged) == 1
    assert [copy.blocking for copy in seen.graph.placement.copies_after] == [False]
    lowered = seen.lowering("placement")
    assert (lowered.host_to_device_copies, lowered.blocking_copies) == (1, 0)
    assert seen.stock.blocking_copies == 1, "what there is to gain"


def test_mutated_cpu_state__is_not_placed_with_a_reason(seen: Seen) -> None:
    assert any("CPU memory" in left.reason or "writes" in left.reason for left in seen.graph.placement.left)
    assert seen.graph.placement.cpu_nodes_after


def test_device_constant__needs_no_placement(seen: Seen) -> None:
    after = seen.graph.placement
    assert after.untouched is not None
    assert (after.copies_after, after.hoisted, after.staged) == ((), (), ())
    assert seen.lowering("placement").model_copy(update={"setting": "graph"}) == seen.stock
