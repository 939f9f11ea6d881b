"""A run prints a line for each event and an estimate of the time left."""

from __future__ import annotations

import io
import re

from fixtures.synthetic_results import cell, failed_cell
from rich.console import Console

from suite.results.schema import Shortage, Status
from suite.run.progress import Display, outcome


def test_events_are_plain_lines_with_their_time() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=40), {"EOS": 90.0, "ST": 30.0})
    display.workload_starts("EOS", ["compile", "graph"])
    display.phase("compile", "warm-up")
    display.measured("compile", 5)
    display.cell_ends(cell("EOS", "compile", wall_s=72.0))
    display.cell_ends(failed_cell("EOS", "graph", Status.TIMEOUT, error="[build] took too long\nsecond line"))
    display.note("a [remark]")
    display.workload_starts("ST", ["compile"])
    lines = out.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    assert [line[9:] for line in lines] == [
        "EOS (1 of 2, about 2m00s left): compile, graph",
        "EOS compile: warm-up",
        "EOS compile: measured 5 blocks",
        "EOS compile: pass in 1m12s",
        "EOS graph: timeout in 10s: [build] took too long",
        "a [remark]",
        "ST (2 of 2, about 30s left): compile",
    ]
    assert "\x1b" not in out.getvalue()


def test_outcome_is_one_line() -> None:
    assert outcome(cell("EOS", "compile", wall_s=3.0)) == "EOS compile: pass in 3s"
    assert outcome(failed_cell("EOS", "graph", Status.OOM, error="a\nb")) == "EOS graph: oom in 10s: a"


def test_outcome_names_the_phase_that_lacked_memory() -> None:
    short = [
        Shortage(mode="graph", process=0, phase="metrics", error="no memory"),
        Shortage(mode="compile", process=1, phase="measure", error="none left"),
    ]
    assert outcome(cell("EOS", "graph", wall_s=3.0, shortages=short)) == (
        "EOS graph: pass in 3s; process 1 lacked memory in phase 'metrics': no memory; "
        "compile, process 2 lacked memory in phase 'measure': none left"
    )
