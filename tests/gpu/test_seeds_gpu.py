"""Backwards of memory-efficient attention without graphs after forwards with graphs, and the opposite, on a GPU.

Each way runs in a process of its own: a seed at the wrong place is a segmentation fault or an illegal address.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_harness import run_script
from seed_programs import MOVED, ON_THE_HOST, OTHERS, WITHOUT_REPLAYS

from optimizations.trees.reasons import FORWARD_UNCAPTURED

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).parent / "seed_programs.py"


@pytest.mark.parametrize("way", MOVED)
def test_uncaptured_backward_reads_its_seeds(way: str) -> None:
    """The program compares its results with eager's."""
    found = run_script(PROGRAM, way)
    assert found["moved"] > 0, "the way was not taken"
    assert found["replays"] > 0, "the forward had no graph"


@pytest.mark.parametrize("way", OTHERS)
def test_backward_of_an_uncaptured_forward_is_not_captured(way: str) -> None:
    found = run_script(PROGRAM, way)
    assert found["replays"] > 0 or way in WITHOUT_REPLAYS
    if way in ON_THE_HOST:
        assert found["reasons"][FORWARD_UNCAPTURED] > 0
