"""The obstacles of published programs, as explain finds them: those that `test_workloads` does not lower.

All are traced by one process, which lowers nothing, for lowering is what takes time.
"""

from __future__ import annotations

from collections import Counter

import pytest
from explain_seen import explained

from suite.explain.records import Explanation

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Explanation]:
    names = ("DALLE2", "BSCG", "STCLM", "VM", "DMLM", "DBV2", "XLNET-T")
    found = explained(tmp_path_factory.mktemp("traced"), *((name, "published/traced") for name in names))
    return {acronym: explanation for (acronym, _), explanation in found.items()}


def test_dalle2_moves_its_mask_in_every_block(traced: dict[str, Explanation]) -> None:
    (graph,) = traced["DALLE2"].graphs
    moves = [copy for copy in graph.placement.copies_before if "self.mask" in (copy.source_line or "")]
    assert len(moves) == 4, "two blocks, called twice"
    assert all(copy.blocking for copy in moves)
    kinds = Counter(node.kind for node in graph.placement.cpu_nodes_before)
    assert kinds["attribute"] == 1, "one tensor for all blocks"
    assert traced["DALLE2"].breaks == []


@pytest.mark.parametrize("acronym", ["BSCG", "STCLM"])
def test_layer_drop_breaks_the_graph_where_it_branches(traced: dict[str, Explanation], acronym: str) -> None:
    breaks = traced[acronym].breaks
    assert any("if dropout_probability < self.layerdrop" in (each.source_line or "") for each in breaks)
    assert any("branching" in each.reason for each in breaks)
    assert len(traced[acronym].graphs) > 3


def test_mask_rcnn_breaks_at_data_dependent_sizes(traced: dict[str, Explanation]) -> None:
    assert any("Dynamic shape operator" in each.reason for each in traced["VM"].breaks)
    nodes = [node.operation for graph in traced["VM"].graphs for node in graph.placement.cpu_nodes_before]
    anchors = [operation for operation in nodes if "anchor_generator.cell_anchors" in operation]
    assert len(anchors) == 5, "a CPU tensor for each level"
