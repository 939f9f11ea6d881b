"""`encore draw graph` on a GPU: the graphs of a workload are recorded, ordered, timed and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from suite.cli.main import app
from suite.draw.records import read_graphs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("workload", ["MMC", "DCGAN"])
def test_workload_is_drawn_with_times_of_its_kernels(tmp_path: Path, workload: str) -> None:
    saved, drawing = tmp_path / "graphs.json", tmp_path / "graphs.svg"
    arguments = ["draw", "graph", workload, "--size", "tiny", "--save", str(saved), "--svg", str(drawing)]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, (ran.output, ran.exception)
    graphs = [one for one in read_graphs(saved) if one.concurrency.order]
    assert graphs and len(list(tmp_path.glob("*.svg"))) == len(read_graphs(saved))
    timed = [one for one in graphs if one.times_us is not None]
    assert timed, "no graph was found in the profile"
    assert all(us > 0 for us in timed[0].times_us or ())
    lines = [launch.source_line for launch in timed[0].concurrency.order if launch.source_line is not None]
    assert any(".py:" in line for line in lines)
