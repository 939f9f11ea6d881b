"""Explain finds the published obstacles of registered workloads in their tiny sizes."""

from __future__ import annotations

from collections import Counter

import pytest
from explain_seen import TRACED, explained

from suite.explain.records import Explanation, Lowering
from suite.explain.run import explain_many
from suite.explain.targets import Target

FORKED = (
    *("XLNET-I/current", *(f"{name}/published" for name in ("MMC", "ST", "DCGAN", "DGPT2")), f"ST/current{TRACED}"),
    *(f"{name}/published{TRACED}" for name in ("DALLE2", "BSCG", "STCLM", "VM", "DMLM", "DBV2", "XLNET-T")),
)

Found = dict[str, Explanation]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def explanations(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """One is for a process that `explain_many` starts, the others for processes without PyTorch's compilers."""
    ((_, found),) = explain_many([Target("XLNET-I", "published", "tiny")])
    forked = explained(tmp_path_factory.mktemp("explained"), *FORKED).items()
    made = {"XLNET-I/published": found, **{name: seen.explanation for name, seen in forked}}
    assert {name: one.error for name, one in made.items() if one.error} == {}
    return made


def lowered(explanation: Explanation, setting: str) -> list[Lowering]:
    assert explanation.error is None
    return [lowering for graph in explanation.graphs for lowering in graph.lowerings if lowering.setting == setting]


def test_mmc_copies_its_mask_in_each_call(explanations: Found) -> None:
    explanation = explanations["MMC/published"]
    (graph,) = explanation.graphs
    assert Counter(node.kind for node in graph.placement.cpu_nodes_before) == {"attribute": 1, "constant": 1}
    mask, rows = graph.placement.copies_before
    assert (mask.kind, rows.kind) == ("copy", "implicit")
    assert mask.blocking
    assert mask.source_line is not None
    assert "self.causal_mask.to(x.device)" in mask.source_line
    (stock,), (unpartitioned,) = lowered(explanation, "graph"), lowered(explanation, "graph-unpartitioned")
    assert (stock.partitions, stock.kernels_outside, stock.blocking_copies) == (1, 0, 1)
    assert (unpartitioned.partitions, unpartitioned.kernels_in_graphs) == (0, 0)
    assert unpartitioned.kernels_outside == stock.kernels_in_graphs


def test_published_xlnet_is_moved_with_partitions_else_blocked(explanations: Found) -> None:
    explanation = explanations["XLNET-I/published"]
    (graph,) = explanation.graphs
    assert Counter(node.kind for node in graph.placement.cpu_nodes_before) == {"constant": 2, "computed": 9}
    assert len(graph.placement.copies_before) == 1
    (stock,), (unpartitioned,) = lowered(explanation, "graph"), lowered(explanation, "graph-unpartitioned")
    assert (stock.partitions, stock.kernels_outside, stock.cpu_kernels, stock.host_to_device_copies) == (1, 0, 0, 0)
    assert (unpartitioned.partitions, unpartitioned.cpu_kernels, unpartitioned.host_to_device_copies) == (0, 1, 1)
    (why,) = unpartitioned.not_captured
    assert "cpu device" in why.reason


def test_current_xlnet_has_no_obstacle(explanations: Found) -> None:
    explanation = explanations["XLNET-I/current"]
    (graph,) = explanation.graphs
    assert (graph.placement.cpu_nodes_before, graph.placement.copies_before, graph.stock_captures) == ((), (), True)
    for setting in ("graph", "graph-unpartitioned"):
        (lowering,) = lowered(explanation, setting)
        assert (lowering.partitions, lowering.kernels_outside, lowering.not_captured) == (1, 0, [])


def test_st_breaks_where_lengths_are_read(explanations: Found) -> None:
    explanation = explanations["ST/published"]
    scalars = [node for graph in explanation.graphs for node in graph.placement.cpu_nodes_before]
    assert {(node.kind, node.dtype, str(node.shape)) for node in scalars} == {("attribute", "float64", "()")}
    assert all(node.operation.endswith(".temperature") for node in scalars)
    reasons = {each.reason.partition(";")[0] for each in explanation.breaks}
    assert "Dynamic shape operator" in reasons
    assert any("item()" in reason for reason in reasons)
    assert all("lengths[row]" in str(each.source_line) for each in explanation.breaks if "item()" in each.reason)
    with_scalars = [graph for graph in explanation.graphs if graph.placement.cpu_nodes_before]
    assert [len(graph.placement.cpu_nodes_before) for graph in with_scalars] == [2, 4], (
        "an attention in each encoder, two in a decoder"
    )
    for graph in with_scalars:
        by_setting = {lowering.setting: lowering for lowering in graph.lowerings}
        stock, unpartitioned = by_setting["graph"], by_setting["graph-unpartitioned"]
        assert (stock.partitions, stock.kernels_outside) == (1, 0)
        assert (stock.host_to_device_copies, stock.blocking_copies) == (1, 0)
        assert (unpartitioned.partitions, unpartitioned.kernels_in_graphs) == (0, 0)


@pytest.mark.parametrize(("acronym", "least"), [("DCGAN", 5 + 3), ("DGPT2", 2 * 5)])
def test_training_is_lowered_and_names_what_is_not_seen(explanations: Found, acronym: str, least: int) -> None:
    """`least`: a kernel for each convolution, attention, norm and linear layer."""
    explanation = explanations[f"{acronym}/published"]
    assert explanation.task == "training"
    assert any(limit.startswith("gradients: graphs are lowered without autograd") for limit in explanation.limits)
    (graph,) = explanation.graphs
    assert graph.stock_captures is True
    for lowering in graph.lowerings:
        assert (lowering.partitions, lowering.kernels_outside) == (1, 0)
        assert lowering.kernels_in_graphs >= least


@pytest.mark.parametrize("acronym", ["ST", "MMC", "XLNET-I"])
def test_placement_leaves_no_cpu_value(explanations: Found, acronym: str) -> None:
    reports = [graph.placement for graph in explanations[f"{acronym}/published"].graphs]
    assert sum(len(report.cpu_nodes_before) for report in reports) >= 2
    for report in reports:
        assert (report.cpu_nodes_after, report.copies_after, report.left) == ((), (), ())
    assert {value.form for report in reports for value in report.hoisted} == {"kept"}


def test_dalle2_moves_its_mask_in_every_block(explanations: Found) -> None:
    (graph,) = explanations["DALLE2/published"].graphs
    moves = [copy for copy in graph.placement.copies_before if "self.mask" in (copy.source_line or "")]
    assert len(moves) == 4, "two blocks, called twice"
    assert all(copy.blocking for copy in moves)
    kinds = Counter(node.kind for node in graph.placement.cpu_nodes_before)
    assert kinds["attribute"] == 1, "one tensor for all blocks"
    assert explanations["DALLE2/published"].breaks == []


@pytest.mark.parametrize("acronym", ["BSCG", "STCLM"])
def test_layer_drop_breaks_the_graph_where_it_branches(explanations: Found, acronym: str) -> None:
    breaks = explanations[f"{acronym}/published"].breaks
    assert any("if dropout_probability < self.layerdrop" in (each.source_line or "") for each in breaks)
    assert any("branching" in each.reason for each in breaks)
    assert len(explanations[f"{acronym}/published"].graphs) > 3


def test_mask_rcnn_breaks_at_data_dependent_sizes(explanations: Found) -> None:
    assert any("Dynamic shape operator" in each.reason for each in explanations["VM/published"].breaks)
    nodes = [
        node.operation for graph in explanations["VM/published"].graphs for node in graph.placement.cpu_nodes_before
    ]
    anchors = [operation for operation in nodes if "anchor_generator.cell_anchors" in operation]
    assert len(anchors) == 5, "a CPU tensor for each level"
