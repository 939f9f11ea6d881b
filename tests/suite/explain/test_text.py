"""Explanations as text."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console

from optimizations.report import Copy, CpuNode, PlacementReport
from suite.explain.records import Explanation, FxGraph, GraphBreak, Lowering, NonStaticInput
from suite.explain.text import MOST_ROWS, render, summary
from suite.results.schema import EXPLANATION_VERSION, NotCaptured

LINE = "program.py:3 in forward: y = x + self.mask.to(x.device)"


def explanation(*, cpu_nodes: int = 1, error: str | None = None, lowered: bool = True) -> Explanation:
    node = CpuNode("mask", "self.mask", "attribute", (4, 4), "float32", LINE)
    copies = (Copy("to", "mask", 3 * 2**20, True, LINE),)
    placement = PlacementReport("cuda:0", None, 7, cpu_nodes_before=(node,) * cpu_nodes, copies_before=copies)
    lowering = Lowering(
        setting="graph",
        partitions=2,
        kernels_in_graphs=5,
        kernels_outside=1,
        cpu_kernels=3,
        host_to_device_copies=1,
        blocking_copies=1,
        not_captured=[NotCaptured(reason="DeviceCopy ops", source_line=LINE, count=2)],
    )
    graph = FxGraph(
        index=0,
        operations=7,
        placement=placement,
        non_static_inputs=[NonStaticInput(node="x", shape=[2], dtype="int64", input_bytes=16)],
        non_static_input_bytes=16,
        stock_captures=False,
        lowerings=[lowering] if lowered else [],
    )
    return Explanation(
        schema_version=EXPLANATION_VERSION,
        target="MMC",
        variant="published",
        task="inference",
        batch=1,
        torch="2.11.0",
        graphs=[graph],
        breaks=[GraphBreak(reason="Dynamic shape operator", source_line=LINE)] * 2,
        limits=["one call is traced"],
        error=error,
    )


def printed(explained: Explanation) -> str:
    console = Console(file=StringIO(), width=200, no_color=True)
    console.print(render(explained))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_summary_counts_obstacles_and_graphs() -> None:
    assert summary(explanation()) == (
        "1 FX graph, 1 CPU node (0 after placement), 1 host-to-device copy per call (0 after placement), "
        "stock captures 5 of 6 kernels"
    )
    assert summary(explanation(lowered=False)).endswith("not lowered as stock would")
    (graph,) = explanation().graphs
    other = [lowering.model_copy(update={"setting": "placement"}) for lowering in graph.lowerings]
    changed = explanation().model_copy(update={"graphs": [graph.model_copy(update={"lowerings": other})]})
    assert summary(changed).endswith("not lowered as stock would"), "what placement captures is not stock's"


def test_scalars_are_no_copies_and_placement_is_counted() -> None:
    (graph,) = explanation().graphs
    scalar = Copy("mul", "scale", 8, False, LINE, "scalar")
    (left,), staging = graph.placement.copies_before, Copy("staging", "x", 16, False, None)
    placement = replace(
        graph.placement,
        copies_before=(left, scalar),
        copies_after=(left, staging, scalar),
        cpu_nodes_after=tuple(graph.placement.cpu_nodes_before * 2),
    )
    changed = explanation().model_copy(update={"graphs": [graph.model_copy(update={"placement": placement})]})
    assert "1 CPU node (2 after placement), 1 host-to-device copy per call (2 after placement)" in summary(changed)
    assert "copied to device: 2 (1 blocking) before" in printed(changed)


def test_text_contains_every_finding() -> None:
    text = printed(explanation(error="Trouble: [here]"))
    for part in (
        "MMC (published): inference, batch 1",
        "not fully captured by stock",
        "1 non-static input of 16 B",
        "self.mask",
        "3.0 MB",
        "DeviceCopy ops x2 at program.py:3",
        "1 (1)",
        "Dynamic shape operator",
        "one call is traced",
        "Trouble: [here]",
    ):
        assert part in text, part


def test_long_lists_are_cut_with_a_count() -> None:
    text = printed(explanation(cpu_nodes=MOST_ROWS + 5))
    assert text.count("self.mask  ") == MOST_ROWS
    assert "... and 5 more" in text
