"""Stochastic workloads are tried by processes that are not measured, and modes between have the bits of those tried."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.tiny_run import tiny_run

from suite.results.schema import Status

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

MODES = ("eager", "compile", "graph", "graph-unpartitioned", "lean", "encore")


def test_each_mode_compiles_once_and_three_are_tried_elsewhere(tmp_path: Path) -> None:
    cells, said = tiny_run(tmp_path / "run", ("DGPT2", "DR-T"), MODES, processes=2)
    assert "could not be tried apart" not in said
    for (workload, mode), cell in cells.items():
        assert cell.status is Status.PASS and cell.correctness is not None, (workload, mode, cell.error)
        assert cell.correctness.fallback_random == (mode != "eager"), (workload, mode)
        # Where atomics add, what varies may have been seen by one process and not by another, which then tries itself.
        if mode in ("graph-unpartitioned", "lean") and workload == "DR-T":
            assert f"{workload} {mode}: compare" not in said  # who is tried by its own process compares, and says so
            others = [cells[workload, other].correctness for other in ("compile", "graph", "encore")]
            assert cell.correctness.digests in [other.digests for other in others if other is not None]
