"""Backwards of memory-efficient attention without graphs after forwards with graphs, and the opposite, on a GPU.

Each way runs in a process of its own: a seed at the wrong place is a segmentation fault or an illegal address.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from seed_programs import MOVED, ON_THE_HOST, OTHERS, WITHOUT_REPLAYS

from optimizations.trees.reasons import FORWARD_UNCAPTURED

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).parent / "seed_programs.py"


def run(way: str) -> dict[str, Any]:
    command = [sys.executable, str(PROGRAM), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{way} ended with {done.returncode}:\n{done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("way", MOVED)
def test_backward_without_graph_reads_its_seeds(way: str) -> None:
    """Its numbers are compared with eager's by the program."""
    found = run(way)
    assert found["moved"] > 0, "the way was not taken"
    assert found["replays"] > 0, "the forward had no graph"


@pytest.mark.parametrize("way", OTHERS)
def test_backward_of_forward_without_graph_is_not_captured(way: str) -> None:
    found = run(way)
    assert found["replays"] > 0 or way in WITHOUT_REPLAYS
    if way in ON_THE_HOST:
        assert found["reasons"][FORWARD_UNCAPTURED] > 0
