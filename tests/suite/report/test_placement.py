"""Tables of what placement changes, from explanations made by hand."""

from __future__ import annotations

import pytest
from fixtures.synthetic_results import explanation, lowering

from suite.explain.records import Explanation, LeftInPlace, Placed, PlacedValue
from suite.report import explain_tables
from suite.report.published import load_published
from suite.report.table import Table

LINE = "model.py:12, in forward: y = x / self.scale"


PUBLISHED = load_published()


def explained(name, explanations):
    return explain_tables.table(name, explanations, PUBLISHED)


def placed_explanation() -> Explanation:
    """ST's two graphs after placement: of the first one value is kept, one staged, and one node left."""
    first, second = explanation("ST").graphs
    placement = Placed(
        untouched=None,
        cpu_nodes=1,
        copies=2,
        blocking_copies=1,
        values=[
            PlacedValue(node="scale_0", form="kept", value_bytes=8, source_line=LINE),
            PlacedValue(node="ids", form="staged", value_bytes=32, source_line=None),
        ],
        left=[LeftInPlace(node="rand", operation="rand", reason="draws random numbers", source_line=LINE)],
    )
    nothing = Placed(untouched="nothing is on the CPU", cpu_nodes=0, copies=0, blocking_copies=0, values=[], left=[])
    return explanation(
        "ST",
        graphs=[
            first.model_copy(
                update={"placement": placement, "lowerings": [*first.lowerings, lowering("placement", 40, 0)]}
            ),
            second.model_copy(
                update={"placement": nothing, "lowerings": [*second.lowerings, lowering("placement", 60, 0)]}
            ),
        ],
    )


def only_row(table: Table) -> dict[str, object]:
    (found,) = table.frame.to_dict("records")
    return {str(column): value for column, value in found.items()}


def test_placement_is_counted_before_and_after():
    found = only_row(explained("explain_placement", [placed_explanation()]))
    assert (found["cpu_nodes"], found["cpu_nodes_placed"]) == (2, 1)
    assert (found["host_to_device_copies"], found["copies_placed"]) == (1, 2)
    assert (found["blocking_copies"], found["blocking_copies_placed"]) == (1, 1)
    assert (found["partitions"], found["partitions_placed"]) == (2, 2)
    assert (found["values_kept"], found["values_in_graph"], found["values_staged"]) == (1, 0, 1)
    assert (found["cpu_outputs"], found["nodes_left"]) == (0, 1)


def test_a_graph_that_was_not_planned_leaves_no_total():
    found = only_row(explained("explain_placement", [explanation("ST")]))
    assert found["cpu_nodes"] == 2
    assert found["cpu_nodes_placed"] is None
    assert found["partitions_placed"] is None


def test_models_without_cpu_nodes_are_not_among_them():
    (_, second) = explanation().graphs
    assert explained("explain_placement", [explanation(graphs=[second])]).frame.empty


def test_what_is_left_is_listed_with_reason_and_line():
    found = only_row(explained("explain_left", [placed_explanation()]))
    assert found == {
        "workload": "ST",
        "operation": "rand",
        "reason": "draws random numbers",
        "source_line": LINE,
        "nodes": 1,
    }


def test_overview_has_kernel_shares_and_waits_of_each_setting():
    found = only_row(explained("explain_overview", [placed_explanation()]))
    assert found["graph_percent"] == pytest.approx(90.0)
    assert found["graph-unpartitioned_percent"] == pytest.approx(60.0)
    assert found["placement_percent"] == pytest.approx(100.0)
    assert (found["graph_breaks"], found["host_waits"], found["host_waits_placed"]) == (1, 1, 1)
    assert found["non_static_input_bytes"] == 32


def test_the_overview_of_a_failed_analysis_is_empty_not_zero():
    found = only_row(explained("explain_overview", [explanation("MMC", graphs=[], breaks=[], limits=[], error="no")]))
    assert found["workload"] == "MMC"
    assert all(value is None for column, value in found.items() if column != "workload")
