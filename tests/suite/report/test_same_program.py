"""Equal programs are compared with each other, and verdicts between them are counted as false findings."""

from __future__ import annotations

import pytest
from fixtures.synthetic_results import block, cell, environment, failed_cell, metrics

from suite.report.compare import Ratios
from suite.report.runs import Run
from suite.report.speedup_tables import false_findings, same_program, same_program_pairs
from suite.results.schema import Status


def steady(host_us, **changes):
    blocks = [
        block(index, [time, time], index).model_copy(update={"process": process})
        for process, time in enumerate(host_us)
        for index in range(6)
    ]
    return {"blocks": blocks, "processes": len(host_us), **changes}


def run_of(*cells):
    return Run(environment(), cells)


def test_verdict_between_equal_programs_is_a_false_finding():
    run = run_of(
        cell("A", "graph", **steady([100] * 3)),
        cell("A", "placement", **steady([100] * 3)),
        cell("B", "graph", **steady([100] * 3)),
        cell("B", "placement", **steady([80] * 3)),
    )
    pairs = same_program_pairs(Ratios(run.cells))
    assert [(pair.cell.workload, pair.baseline) for pair in pairs] == [("A", "graph"), ("B", "graph")]
    assert {pair.cell.workload for pair in false_findings(pairs)} == {"B"}
    note = same_program(Ratios(run.cells)).note
    assert "1 of 2 verdicts (50.0 %)" in note


@pytest.mark.parametrize(
    "other",
    [
        metrics(graph_kernels=80),
        metrics(placeholder_bytes=0),
        metrics().model_copy(update={"kernels": {"gemm 4x1x1 128x1x1": 1}}),
        metrics().model_copy(update={"coverage": None}),
        None,
    ],
)
def test_modes_with_other_launches_or_copies_are_not_one_program(other):
    run = run_of(cell("A", "graph"), cell("A", "placement", metrics=other))
    assert same_program_pairs(Ratios(run.cells)) == []


def test_failed_and_undeclared_modes_are_no_pairs():
    run = run_of(
        cell("A", "compile"),
        cell("A", "graph"),
        cell("A", "graph-unpartitioned"),
        failed_cell("A", "placement", Status.OOM),
        cell("A", "indirection"),
    )
    assert same_program_pairs(Ratios(run.cells)) == []


def test_run_without_pairs_is_reported():
    table = same_program(Ratios((cell("A", "compile", **steady([100])),)))
    assert len(table.frame) == 0
    assert "0 of 0 verdicts on modes" in table.note
