"""Equal programs are compared with each other, and verdicts between them are counted as false findings."""

from __future__ import annotations

import pytest
from fixtures.synthetic_results import cell, failed_cell, metrics, timed

from suite.report.compare import Ratios
from suite.report.speedup_tables import false_findings, same_program, same_program_pairs
from suite.results.schema import Status


def test_verdict_between_equal_programs_is_a_false_finding():
    cells = [
        cell(workload, mode, **timed(*[us] * 3))
        for workload, placement in (("A", 100), ("B", 80))
        for mode, us in (("graph", 100), ("placement", placement))
    ]
    pairs = same_program_pairs(Ratios(tuple(cells)))
    assert [(pair.cell.workload, pair.baseline) for pair in pairs] == [("A", "graph"), ("B", "graph")]
    assert {pair.cell.workload for pair in false_findings(pairs)} == {"B"}
    assert "1 of 2 verdicts (50.0 %)" in same_program(Ratios(tuple(cells))).note


@pytest.mark.parametrize(
    "cells",
    [
        *(
            (cell("A", "graph"), cell("A", "placement", metrics=other))
            for other in (
                metrics(graph_kernels=80),
                metrics(placeholder_bytes=0),
                metrics().model_copy(update={"kernels": {"gemm 4x1x1 128x1x1": 1}}),
                metrics().model_copy(update={"coverage": None}),
                None,
            )
        ),
        (cell("A", "graph"), failed_cell("A", "placement", Status.OOM)),
        tuple(cell("A", mode) for mode in ("compile", "graph", "graph-unpartitioned", "indirection")),
    ],
)
def test_other_launches_or_undeclared_modes_are_not_one_program(cells):
    ratios = Ratios(cells)
    assert same_program_pairs(ratios) == []
    table = same_program(ratios)
    assert len(table.frame) == 0 and "0 of 0 verdicts on modes" in table.note
