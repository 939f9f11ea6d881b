"""Kernels are tuned once, by the first process of the first mode: whoever comes after runs the same ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.tiny_run import tiny_run

from suite.measure.kernels import difference

pytestmark = pytest.mark.gpu

MODES = ("compile", "graph", "encore")
TUNING = "CachingAutotuner.benchmark_all_configs"
"""What Inductor calls the part of a compilation in which it tunes kernels."""


def test_later_processes_of_all_modes_run_what_the_first_tuned(tmp_path: Path) -> None:
    cells, _ = tiny_run(tmp_path / "run", ("MBERT", "DCGAN"), MODES, processes=3)
    assert len(cells) == 6
    first = [cells[workload, "compile"] for workload in ("MBERT", "DCGAN")]
    assert any(cell.compile and TUNING in cell.compile.parts for cell in first), "nothing was there to tune"
    for (workload, mode), cell in cells.items():
        assert len(cell.later) == 2, (workload, mode)
        for process in cell.later:
            assert process.compile is not None
            assert (process.retuned, process.compile.parts.get(TUNING)) == ([], None), (workload, mode, process.process)
        if mode == "graph":  # it has the kernels of `compile`, and compiled side by side with it
            assert cell.compile is not None and TUNING not in cell.compile.parts, workload
        theirs, ours = cells[workload, "compile"].metrics, cell.metrics
        assert theirs is not None and ours is not None and theirs.kernels and ours.kernels
        assert difference(ours.kernels, theirs.kernels).retuned == (), (workload, mode)
