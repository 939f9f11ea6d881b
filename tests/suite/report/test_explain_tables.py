"""Tables of what `encore explain` found, from explanations made by hand."""

from __future__ import annotations

import pytest
from fixtures.synthetic_results import explanation, lowering

from suite.explain.records import Explanation, LeftInPlace, Placed
from suite.report import explain_tables
from suite.report.published import load_published

LINE = "model.py:12, in forward: y = x / self.scale"


def rows(name: str, *explanations: Explanation) -> list[dict[str, object]]:
    (table,) = (each for each in explain_tables.all_tables(explanations, load_published()) if each.name == name)
    return [{str(column): value for column, value in row.items()} for row in table.frame.to_dict("records")]


def placed_explanation() -> Explanation:
    """ST's two graphs after placement: one node of the first is left on the CPU."""
    first, second = explanation("ST").graphs
    left = [LeftInPlace(node="rand", operation="rand", reason="draws random numbers", source_line=LINE)]
    some = Placed(untouched=None, cpu_nodes=1, copies=2, blocking_copies=1, values=[], left=left)
    none = some.model_copy(update={"cpu_nodes": 0, "copies": 0, "blocking_copies": 0, "left": []})
    graphs = [
        graph.model_copy(update={"placement": placement, "lowerings": [*graph.lowerings, lowering("placement", 40, 0)]})
        for graph, placement in ((first, some), (second, none))
    ]
    return explanation("ST", graphs=graphs)


def test_overview_has_kernel_shares_and_waits_of_each_setting() -> None:
    (found,) = rows("explain_overview", placed_explanation())
    assert found["graph_percent"] == pytest.approx(90.0)
    assert found["graph-unpartitioned_percent"] == pytest.approx(60.0)
    assert found["placement_percent"] == pytest.approx(100.0)
    assert (found["graph_breaks"], found["host_waits"], found["host_waits_placed"]) == (1, 1, 1)
    assert (found["cpu_nodes"], found["non_static_input_bytes"]) == (2, 32)
    assert (found["grace_stock_percent"], found["grace_placement_percent"]) == (5.14, 74.22)


def test_tiny_and_changed_models_have_no_published_coverage() -> None:
    found = rows("explain_overview", explanation(size="tiny"), explanation(variant="current"))
    assert [one["workload"] for one in found] == ["ST (tiny)", "ST (current)"]
    assert not any("grace_stock_percent" in one for one in found)


def test_failed_analysis_has_an_empty_row() -> None:
    failed = explanation("MMC", graphs=[], breaks=[], limits=[], error="no")
    whole, found = rows("explain_overview", explanation("ST"), failed)
    assert found["workload"] == "MMC" and whole["host_waits_placed"] is None, "not all graphs were planned"
    assert all(value is None for column, value in found.items() if column != "workload")


def test_model_lowered_in_part_has_no_share() -> None:
    first, second = explanation().graphs
    part = explanation(graphs=[first, second.model_copy(update={"lowerings": [lowering("graph", 60, 0)]})])
    (found,) = rows("explain_overview", part)
    assert (found["graph_percent"], found["graph-unpartitioned_percent"]) == (90.0, None)


def test_backward_graphs_count_in_the_overview() -> None:
    first, second = explanation().graphs
    backward = lowering("graph", 50, 50)
    trained = explanation(graphs=[first.model_copy(update={"backward": [backward]}), second])
    assert rows("explain_overview", trained)[0]["graph_percent"] == 70.0
    reasons = [(one["setting"], one["reason"]) for one in rows("explain_not_captured", trained)]
    assert ("graph, backward", "cpu device") in reasons


def test_cpu_nodes_breaks_reasons_and_limits_have_lines() -> None:
    found = [placed_explanation(), explanation("MMC", graphs=[], breaks=[], limits=[], error="ValueError: no")]
    (node,) = rows("explain_cpu_nodes", *found)
    assert (node["kind"], node["shape"], node["nodes"]) == ("attribute", "[]", 2)
    assert str(node["source_line"]).startswith("model.py:12")
    reasons = {(one["setting"], one["reason"]): one["count"] for one in rows("explain_not_captured", *found)}
    assert reasons == {
        ("graph", "cpu device"): 1,
        ("graph-unpartitioned", "cpu device"): 1,
        ("left", "rand: draws random numbers"): 1,
        ("graph break", "Tensor.item"): 1,
        ("limit", "what lies between FX graphs is not analysed"): 1,
        ("failed", "ValueError: no"): 1,
    }
