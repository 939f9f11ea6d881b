"""What a run shows: plain lines where there is no terminal, a live display where there is one, and honest time left."""

from __future__ import annotations

import io
import re

import pytest
from fixtures.synthetic_results import cell, failed_cell
from rich.console import Console

from suite.results.schema import Shortage, Status
from suite.run.progress import Display, LineDisplay, LiveDisplay, TimeLeft, display_for, outcome


def go_through_a_workload(display: Display) -> None:
    display.workload_starts("EOS", ["compile", "graph"])
    display.phase("compile", "warm-up")
    display.block_measured("compile", 3, 5)
    display.cell_ends(cell("EOS", "compile", wall_s=72.0))
    display.cell_ends(failed_cell("EOS", "graph", Status.TIMEOUT, error="[build] took too long\nsecond line"))
    display.note("a [remark]")
    display.workload_ends()


def test_without_a_terminal_there_are_plain_lines() -> None:
    out = io.StringIO()
    with display_for(Console(file=out, width=40), {"EOS": 90.0, "ST": 30.0}) as display:
        assert isinstance(display, LineDisplay)
        go_through_a_workload(display)
    lines = out.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    assert [line[9:] for line in lines] == [
        "EOS (1 of 2, about 2m00s left): compile, graph",
        "EOS compile: warm-up",
        "EOS compile: pass in 1m12s",
        "EOS graph: timeout in 10s: [build] took too long",
        "a [remark]",
    ]
    assert "\x1b" not in out.getvalue()


def test_a_terminal_shows_workload_mode_phase_and_time_left() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, _environ={"TERM": "xterm"})
    with display_for(console, {"EOS": 90.0, "ST": 30.0}) as display:
        assert isinstance(display, LiveDisplay)
        display.workload_starts("EOS", ["compile", "graph"])
        display.phase("compile", "warm-up")
        display.block_measured("graph", 3, 5)
        console.print(display._render())
        shown = out.getvalue()
        for words in ("EOS", "compile", "warm-up", "graph", "measure, block 3 of 5", "0 of 2 workloads", "2m00s left"):
            assert words in shown
        go_through_a_workload(display)
    assert "EOS compile: pass in 1m12s" in out.getvalue()
    assert "a [remark]" in out.getvalue()


@pytest.mark.parametrize("terminal", [{"TERM": "dumb"}, {"TERM": "unknown"}])
def test_a_terminal_without_cursor_control_gets_plain_lines(terminal: dict[str, str]) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ=terminal)
    assert isinstance(display_for(console, {}), LineDisplay)


def test_time_left_counts_down_within_a_workload() -> None:
    now = [0.0]
    left = TimeLeft({"EOS": 90.0, "ST": 30.0}, clock=lambda: now[0])
    assert left.seconds() == 120.0
    left.starts("EOS")
    now[0] = 60.0
    assert left.seconds() == 60.0
    now[0] = 600.0
    assert left.seconds() == 30.0, "late, but the other workload still takes its time"
    left.ends()
    left.starts("ST")
    assert left.seconds() == 30.0
    left.ends()
    assert left.seconds() == 0.0


def test_an_outcome_is_one_line() -> None:
    assert outcome(cell("EOS", "compile", wall_s=3.0)) == "EOS compile: pass in 3s"
    assert outcome(failed_cell("EOS", "graph", Status.OOM, error="a\nb")) == "EOS graph: oom in 10s: a"


def test_an_outcome_says_what_memory_was_not_enough_for() -> None:
    short = [
        Shortage(mode="graph", process=0, phase="metrics", error="no memory"),
        Shortage(mode="compile", process=1, phase="measure", error="none left"),
    ]
    assert outcome(cell("EOS", "graph", wall_s=3.0, shortages=short)) == (
        "EOS graph: pass in 3s; process 1 lacked memory in phase 'metrics': no memory; "
        "compile, process 2 lacked memory in phase 'measure': none left"
    )
