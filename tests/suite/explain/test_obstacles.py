"""The obstacles of published programs, as explain finds them: those that `test_workloads` does not lower.

All are traced by one process, which lowers nothing, for lowering is what takes time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "support" / "fixtures" / "explain_workloads.py"
WORKLOADS = ("DALLE2", "BSCG", "STCLM", "VM", "DMLM", "DBV2", "XLNET-T")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("traced")
    targets = [part for name in WORKLOADS for part in (name, "published/traced")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *targets],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    found = {name: json.loads((folder / f"{name}.published.json").read_text()) for name in WORKLOADS}
    assert {name: one["error"] for name, one in found.items() if one["error"]} == {}
    return found


def cpu_values(traced: dict[str, Any]) -> Counter[str]:
    return Counter(node["kind"] for graph in traced["graphs"] for node in graph["placement"]["cpu_nodes_before"])


def source_lines(traced: dict[str, Any]) -> list[str]:
    return [each["source_line"] or "" for each in traced["breaks"]]


def test_dalle2_moves_its_mask_in_every_block(traced: dict[str, dict[str, Any]]) -> None:
    (graph,) = traced["DALLE2"]["graphs"]
    moves = [copy for copy in graph["placement"]["copies_before"] if "self.mask" in (copy["source_line"] or "")]
    assert len(moves) == 4, "two blocks, called twice"
    assert all(copy["blocking"] for copy in moves)
    assert cpu_values(traced["DALLE2"])["attribute"] == 1, "one tensor for all blocks"
    assert traced["DALLE2"]["breaks"] == []


@pytest.mark.parametrize("acronym", ["BSCG", "STCLM"])
def test_layer_drop_breaks_the_graph_where_it_branches(traced: dict[str, dict[str, Any]], acronym: str) -> None:
    where = [line for line in source_lines(traced[acronym]) if "if dropout_probability < self.layerdrop" in line]
    assert where
    assert any("branching" in each["reason"] for each in traced[acronym]["breaks"])
    assert len(traced[acronym]["graphs"]) > 3


def test_mask_rcnn_breaks_at_data_dependent_sizes(traced: dict[str, dict[str, Any]]) -> None:
    assert any("Dynamic shape operator" in each["reason"] for each in traced["VM"]["breaks"])
    anchors = [
        node
        for graph in traced["VM"]["graphs"]
        for node in graph["placement"]["cpu_nodes_before"]
        if "anchor_generator.cell_anchors" in node["operation"]
    ]
    assert len(anchors) == 5, "a CPU tensor for each level"
