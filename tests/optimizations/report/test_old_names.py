"""Renamed report fields keep their old names for one release."""

from __future__ import annotations

from typing import Any

import pytest

from optimizations.report import GraphReport
from optimizations.report.recordings import CountedCalls


def test_slow_calls_have_their_old_name_and_warn() -> None:
    slow = CountedCalls("inference", "the program holds a result", 3)
    nothing: Any = None
    report = GraphReport(0, nothing, (), slow_calls=(slow,))
    with pytest.warns(DeprecationWarning, match="slow_calls"):
        assert report.full_ways == (slow,)
